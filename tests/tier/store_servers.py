"""Servers of stores in processes of their own, and a proxy that disturbs connections to them."""

from __future__ import annotations

import random
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path

FAULTS = ("latency", "reset", "refused", "slow", "truncated")
UNAVAILABLE = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
LOADING = b"-LOADING Redis is loading the dataset in memory\r\n"
_SECONDS = 60.0
_REDIS = shutil.which("redis-server") or shutil.which("valkey-server")


def missing(store: str) -> str:
    """Why a server cannot be run here; nothing where it can."""
    if store == "s3":
        wanted = ("obstore", "moto", "flask")
        return "" if all(map(find_spec, wanted)) else "obstore or moto[server] is not installed"
    if _REDIS is None:
        return "redis-server is not installed"
    return "" if find_spec("redis") else "the redis client is not installed"


@contextmanager
def running(store: str, folder: Path) -> Iterator[int]:
    """Run moto's S3 server with a bucket named `bucket`, or a Redis server; yield its port."""
    port = _free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    if store == "redis":
        assert _REDIS is not None
        command = [_REDIS, "--port", str(port), "--save", "", "--dir", str(folder)]
    quiet = subprocess.DEVNULL
    server = subprocess.Popen(command, stdout=quiet, stderr=quiet)
    try:
        end = time.monotonic() + _SECONDS
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < end, f"{command} does not listen"
            time.sleep(0.05)
        if store == "s3":
            with closing(HTTPConnection("127.0.0.1", port, timeout=_SECONDS)) as connection:
                connection.request("PUT", "/bucket", headers={"Host": f"127.0.0.1:{port}"})
                assert connection.getresponse().status == 200
        yield port
    finally:
        server.kill()
        server.wait()


class Proxy:
    """Relays connections to a port, and disturbs some of them while `fault` is set."""

    def __init__(self, target: int, refusal: bytes) -> None:
        self._target, self._refusal = target, refusal
        self.fault, self.share, self.disturbed = "", 0.5, 0
        self._random, self._open = random.Random(3), set[socket.socket]()  # noqa: S311
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def set(self, fault: str, share: float = 0.5) -> None:
        """Disturb a share of all connections from now on. Connections that are open are closed."""
        self.fault, self.share, self.disturbed = fault, share, 0
        for one in list(self._open):
            _reset(one)

    def close(self) -> None:
        self.set("")
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            self._open.add(client)
            fault = self.fault if self._random.random() < self.share else ""
            self.disturbed += bool(fault)
            threading.Thread(target=self._serve, args=(client, fault), daemon=True).start()

    def _serve(self, client: socket.socket, fault: str) -> None:
        try:
            if fault == "latency":
                time.sleep(0.1)
            if fault == "refused":
                client.recv(1 << 16)
                client.sendall(self._refusal)
                client.shutdown(socket.SHUT_WR)
                with suppress(OSError):
                    while client.recv(1 << 16):
                        pass
                return
            with socket.create_connection(("127.0.0.1", self._target)) as server:
                threading.Thread(target=_relay, args=(client, server), daemon=True).start()
                self._answer(server, client, fault)
        except OSError:
            pass
        finally:
            self._open.discard(client)
            client.close()

    def _answer(self, server: socket.socket, client: socket.socket, fault: str) -> None:
        """Relay what the server sends, up to the point at which the fault happens."""
        left = self._random.randrange(1, 3000) if fault in ("reset", "slow", "truncated") else -1
        while some := server.recv(1 << 16):
            if left < 0 or len(some) < left:
                client.sendall(some)
                left = left if left < 0 else left - len(some)
                continue
            client.sendall(some[:left])
            if fault == "slow":
                for at in range(left, len(some)):
                    client.sendall(some[at : at + 1])
                    time.sleep(0.05)
                left = 1
                continue
            if fault == "reset":
                _reset(client)
            return


def _relay(source: socket.socket, destination: socket.socket) -> None:
    with suppress(OSError):
        while some := source.recv(1 << 16):
            destination.sendall(some)
        destination.shutdown(socket.SHUT_WR)


def _reset(one: socket.socket) -> None:
    """Close a connection with RST."""
    with suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.shutdown(socket.SHUT_RDWR)
        one.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
