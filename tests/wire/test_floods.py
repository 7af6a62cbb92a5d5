"""Thousands of connections that say nothing: few are kept, and genuine peers get through."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvatlas.copying import Memory
from kvatlas.routing import Copy
from kvatlas.wire import make_transport, protocol
from kvatlas.wire.channels import Channels
from kvatlas.wire.connection import split_endpoint
from kvatlas.wire.rpc import Server
from kvatlas.wire.security import Security
from tests.profiles import DEEP
from tests.wire.forking import forked

SECRET = bytes(range(32))
FLOOD = 2000 if DEEP else 400
NEWCOMERS = 4
MOST = 64
"""Connections that are not authenticated, and so at most as many threads and descriptors."""
FEW = 24
"""Threads and descriptors of the process for other purposes, and for the newcomers."""
RENEW = protocol.Renew(session=bytes(16), lease=bytes(16), seconds=1.0)


def serve_data(tester: Connection, secret: bytes | None) -> None:
    """Serve a region over tcp until the tester is gone."""
    pool = np.arange(256, dtype=np.uint8)
    transport: Any = make_transport("tcp")
    transport.register({0: Memory(pool.ctypes.data, pool.nbytes)})
    if secret:
        transport.protect(Security(secret), lambda _: nullcontext())
    tester.send((transport.publish(), transport.memory))
    with suppress(EOFError):
        tester.recv()


def serve_messages(tester: Connection, secret: bytes | None) -> None:
    """Answer messages until the tester is gone."""

    def answer(question: Any, caller: Any) -> protocol.Message:
        del question, caller
        return protocol.Ok(seconds=1.0)

    server = Server("tcp://127.0.0.1:0", answer, security=Security(secret))
    tester.send(server.endpoint)
    with suppress(EOFError):
        tester.recv()


@contextmanager
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * FLOOD:
        pytest.skip("too few descriptors to attack with")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * FLOOD), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Watch(threading.Thread):
    """Notes the most threads and descriptors that a process has."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid, self._over = pid, threading.Event()
        self.threads = self.descriptors = 0
        self.start()

    def run(self) -> None:
        while not self._over.is_set():
            self.threads = max(self.threads, self._count("task"))
            self.descriptors = max(self.descriptors, self._count("fd"))
            time.sleep(0.001)

    def _count(self, what: str) -> int:
        return len(list(Path(f"/proc/{self._pid}/{what}").iterdir()))

    def stop(self) -> None:
        self._over.set()
        self.join()


def flood(address: tuple[str, int], kept: ExitStack) -> None:
    for _ in range(FLOOD):
        with suppress(OSError):
            kept.enter_context(socket.create_connection(address, timeout=10))


def attacked(pid: int, address: tuple[str, int], newcomer: Any) -> Watch:
    """Flood a process from two threads; meanwhile and afterwards, newcomers must get through."""
    with many_descriptors(), ExitStack() as kept:
        watch = Watch(pid)
        attacker = threading.Thread(target=flood, args=(address, kept))
        attacker.start()
        for _ in range(NEWCOMERS // 2):
            newcomer()
        attacker.join()
        for _ in range(NEWCOMERS // 2):
            newcomer()
        watch.stop()
    return watch


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "tls"])
def test_a_flood_of_the_data_port(secret: bytes | None) -> None:
    process, pipe = forked(serve_data, secret)
    assert pipe.poll(30)
    metadata, memory = pipe.recv()
    at = msgspec.msgpack.decode(metadata)

    def newcomer() -> None:
        pool = np.zeros(256, np.uint8)
        with closing(make_transport("tcp")) as end:
            transport: Any = end
            transport.register({0: Memory(pool.ctypes.data, pool.nbytes)})
            if secret:
                transport.protect(Security(secret), lambda _: nullcontext())
            link = transport.connect(metadata, memory)
            whole = Copy(0, 0, np.array([0]), np.array([0]), np.array([256]))
            link.read([whole]).wait(time.monotonic() + 20)
            link.close()
        assert np.array_equal(pool, np.arange(256, dtype=np.uint8))

    watch = attacked(process.pid, (at["address"], at["port"]), newcomer)
    pipe.close()
    process.join(10)
    assert watch.threads <= FEW, "strangers cost no thread"
    assert watch.descriptors <= MOST + FEW


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "tls"])
def test_a_flood_of_the_side_channel(secret: bytes | None) -> None:
    process, pipe = forked(serve_messages, secret)
    assert pipe.poll(30)
    endpoint = pipe.recv()

    def newcomer() -> None:
        with closing(Channels(Security(secret))) as channels:
            said = channels.ask(endpoint, RENEW, deadline=time.monotonic() + 20)
            assert said == protocol.Ok(seconds=1.0)

    watch = attacked(process.pid, split_endpoint(endpoint), newcomer)
    pipe.close()
    process.join(10)
    assert watch.threads <= MOST + FEW
    assert watch.descriptors <= MOST + FEW
