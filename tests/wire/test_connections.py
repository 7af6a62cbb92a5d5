"""Connections of the side channel: kept, counted, and noticed when they end."""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvatlas import AtlasError
from kvatlas.errors import Code
from kvatlas.wire import Session, encoding, protocol
from kvatlas.wire.channels import Channels
from kvatlas.wire.connection import Connection
from kvatlas.wire.rpc import Caller, Server
from kvatlas.wire.security import Security
from tests.wire.attacked import opening
from tests.wire.faulty import Stuck, failure, pair, pull
from tests.wire.helpers import End, ends, pull_all, small, until
from tests.wire.raw import Raw, connected, framed

SECRET = b"known to both ends"
RENEW = protocol.Renew(session=bytes(16), lease=bytes(16), seconds=1.0)
OK = protocol.Ok(seconds=1.0)
Answer = Callable[[Any, Caller], Any]


@contextmanager
def server(answer: Answer = lambda *_: OK, secret: Any = None, **given: Any) -> Iterator[Server]:
    made = Server("tcp://127.0.0.1:0", answer, security=Security(secret), **given)
    with closing(made):
        yield made


@contextmanager
def channels(secret: Any = None) -> Iterator[Channels]:
    with closing(Channels(Security(secret))) as made:
        yield made


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def refused(act: Callable[[], Any]) -> Code:
    with pytest.raises(AtlasError) as refusal:
        act()
    return refusal.value.code


# -- one connection for many questions ----------------------------------------------------


def test_a_check_ends_the_wait_for_an_answer() -> None:
    """As it must when a transfer is cancelled while its peer stands still."""
    answered, checks = threading.Event(), 0

    def answer(*_: Any) -> Any:
        answered.wait(20)
        return OK

    def check() -> None:
        nonlocal checks
        checks += 1
        if checks == 3:
            raise AtlasError(Code.CANCELLED, got="a request", hint="none")

    for secret in (None, SECRET):
        checks = 0
        answered.clear()
        with server(answer, secret) as made, channels(secret) as asks:
            ask = partial(asks.ask, made.endpoint, RENEW, deadline=soon(30))
            assert refused(partial(ask, check=check)) is Code.CANCELLED
            answered.set()
            assert ask() == OK  # on another connection, with its own answer


def test_a_connection_is_kept_for_the_next_question() -> None:
    callers: list[Caller] = []

    def answer(_: Any, caller: Caller) -> Any:
        callers.append(caller)
        return OK

    for secret in (None, SECRET):
        callers.clear()
        with server(answer, secret) as made, channels(secret) as asks:
            for _ in range(50):
                assert asks.ask(made.endpoint, RENEW, deadline=soon()) == OK
        assert len(callers) == 50
        assert len(set(callers)) == 1


def test_connecting_and_the_tls_handshake_share_one_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer that accepts slowly and then says nothing takes no more time than it was given."""
    connect = socket.create_connection

    def slowly(*given: Any, **about: Any) -> socket.socket:
        time.sleep(0.8)
        return connect(*given, **about)

    monkeypatch.setattr(socket, "create_connection", slowly)
    with socket.create_server(("127.0.0.1", 0)) as silent, channels(SECRET) as asking:
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        begun = time.monotonic()
        assert refused(lambda: asking.ask(endpoint, RENEW, deadline=soon(1.0))) == "deadline"
        assert time.monotonic() - begun < 1.6


def test_many_threads_ask_over_few_connections() -> None:
    callers: set[Caller] = set()
    answered: list[Any] = []

    def answer(question: Any, caller: Caller) -> Any:
        callers.add(caller)
        time.sleep(0.002)
        return protocol.Ok(seconds=question.seconds)

    with server(answer) as made, channels() as asks:

        def run(first: int) -> None:
            for number in range(first, first + 10):
                question = protocol.Renew(session=bytes(16), lease=bytes(16), seconds=number)
                said = asks.ask(made.endpoint, question, deadline=soon())
                answered.append(said.seconds == number)

        threads = [threading.Thread(target=run, args=(1 + 10 * n,)) for n in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answered == [True] * 200, "each has its own answer"
    assert len(callers) <= 8


def test_a_peer_that_has_started_again_is_asked_without_a_failure() -> None:
    with channels() as asks:
        with server() as made:
            asks.ask(made.endpoint, RENEW, deadline=soon())
        again = Server(made.endpoint, lambda *_: OK)
        with closing(again):
            assert asks.ask(made.endpoint, opening(bytes(16)), deadline=soon()) == OK


def test_a_question_that_may_have_been_carried_out_is_not_asked_twice() -> None:
    """The peer hangs up on the second question of a connection, once it has it."""
    for question, times in ((opening(bytes(16)), 2), (RENEW, 3)):
        listening = socket.create_server(("127.0.0.1", 0))
        asked: list[int] = []

        def run(listening: socket.socket = listening, asked: list[int] = asked) -> None:
            with suppress(OSError):
                while True:
                    caller, _ = listening.accept()
                    with caller:
                        for number in range(2):
                            if not caller.recv(1 << 16):
                                break
                            asked.append(number)
                            if number == 0:
                                caller.sendall(framed(encoding.encode(OK)))

        thread = threading.Thread(target=run)
        thread.start()
        endpoint = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        with channels() as asks:
            asks.ask(endpoint, question, deadline=soon())
            again = partial(asks.ask, endpoint, question, deadline=soon())
            if times == 2:
                assert refused(again) is Code.PEER_LOST
            else:
                assert again() == OK
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()
        assert len(asked) == times


# -- peers that die -----------------------------------------------------------------------

SERVE = """
import sys, time
from kvatlas.wire import protocol
from kvatlas.wire.rpc import Server
from kvatlas.wire.security import Security
def answer(question, caller):
    if question.seconds > 1:
        time.sleep(60)
    return protocol.Ok(seconds=1.0)
security = Security(sys.argv[1].encode() or None)
print(Server("tcp://127.0.0.1:0", answer, security=security).endpoint, flush=True)
sys.stdin.read()
"""


@contextmanager
def child(secret: bytes | None = None, descriptors: int = 0) -> Iterator[tuple[Any, str]]:
    def limited() -> None:
        if descriptors:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    with subprocess.Popen(
        [sys.executable, "-c", SERVE, (secret or b"").decode()], preexec_fn=limited,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().decode().strip()
        finally:
            process.kill()


def test_a_peer_that_is_killed_is_lost_at_once() -> None:
    """While it is asked, and while nobody asks it anything; a dead endpoint is found at once."""
    with child() as (process, endpoint), channels() as asks:
        asks.ask(endpoint, RENEW, deadline=soon())
        monitor = asks.monitor(endpoint)
        monitor.check()
        slow = protocol.Renew(session=bytes(16), lease=bytes(16), seconds=60.0)
        threading.Timer(0.3, lambda: os.kill(process.pid, signal.SIGKILL)).start()
        begun = time.monotonic()
        assert refused(lambda: asks.ask(endpoint, slow, deadline=soon(60))) == "peer_lost"
        assert refused(lambda: asks.ask(endpoint, RENEW, deadline=soon(60))) == "peer_lost"
        until(lambda: monitor_code(monitor) == "peer_lost")
        assert time.monotonic() - begun < 20


def monitor_code(monitor: Any) -> str:
    try:
        monitor.check()
    except AtlasError as refusal:
        return str(refusal.code)
    return "ok"


def test_the_end_of_a_connection_that_nobody_uses_is_noticed() -> None:
    with server() as made, channels() as asks:
        asks.ask(made.endpoint, RENEW, deadline=soon())
        monitor = asks.monitor(made.endpoint)
        assert monitor_code(monitor) == "ok"
        made.close()
        until(lambda: monitor_code(monitor) == "peer_lost")
        fresh = asks.monitor(made.endpoint)
        assert monitor_code(fresh) == "ok", "what was lost before it was made is not its business"


def test_connections_to_peers_that_have_gone_are_closed() -> None:
    """Also where nobody asks at their endpoints any more: peers come back at others."""

    def opened() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    target = End(small("dense", layout="BLHNC"), 50, seed=2)
    with ends(target):
        before = opened()
        for _ in range(2):
            source = End(small("dense"), 50, seed=1)
            with ends(source):
                source.offer("r")
                pull_all(source, target, "r")
        until(lambda: opened() <= before)


def test_a_transfer_ends_when_its_peer_dies() -> None:
    """The transport would wait on, and the deadline is far away."""
    with ends(*pair()) as (source, target):
        source.offer("r")
        target.arounds = lambda act, copies: Stuck()  # noqa: ARG005
        with Session(target.nodes[0], source.endpoints) as session:
            begun = time.monotonic()
            transfer = pull(session, target, how="direct", timeout=60)
            until(lambda: len(source.nodes[0].leases) > 0)
            source.nodes[0].server.close()
            assert failure(transfer, 30) is Code.PEER_LOST
            assert time.monotonic() - begun < 20


def test_a_peer_that_dies_with_its_answer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is then no idle one that ends: the answer was the last that came."""
    with ends(*pair()) as (source, target):
        source.offer("r")
        target.arounds = lambda act, copies: Stuck()  # noqa: ARG005
        with Session(target.nodes[0], source.endpoints) as session:
            monkeypatch.setattr(Connection, "quiet", property(lambda connection: False))  # noqa: ARG005
            transfer = pull(session, target, how="direct", timeout=60)
            assert failure(transfer, 30) is Code.PEER_LOST


# -- strangers ----------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "secret"])
def test_idle_connections_lock_nobody_out(secret: bytes | None) -> None:
    """1,200 of them, where a process may have 1,024 descriptors; what they send is not kept."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2000:
        pytest.skip("too few descriptors to attack with")
    strangers = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    try:
        with child(secret, descriptors=1024) as (process, endpoint), channels(secret) as asks:
            asks.ask(endpoint, RENEW, deadline=soon())
            before = resident(process.pid)
            for number in range(1200):
                strangers.append(connected(endpoint))
                if number % 8 == 0:
                    with suppress(OSError):
                        # Four megabytes are announced, and some of them come.
                        strangers[-1].settimeout(0.01)
                        strangers[-1].sendall(struct.pack(">I", 4 << 20) + bytes(1 << 18))
            assert asks.ask(endpoint, RENEW, deadline=soon()) == OK
            with channels(secret) as newcomer:
                assert newcomer.ask(endpoint, RENEW, deadline=soon()) == OK
            until(lambda: len(list(Path(f"/proc/{process.pid}/fd").iterdir())) < 100)
            assert resident(process.pid) - before < 64 << 20
    finally:
        for stranger in strangers:
            stranger.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_who_speaks_too_slowly_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then: in the first question, in a later one, in a handshake."""
    question = framed(encoding.encode(RENEW))
    for secret, said in ((None, b""), (None, question), (SECRET, b"")):
        with server(secret=secret) as made, channels(secret) as asks, ExitStack() as stack:
            with monkeypatch.context() as patch:
                patch.setattr("kvatlas.wire.rpc._STRANGER_SECONDS", 0.5)
                patch.setattr("kvatlas.wire.connection.FRAME_SECONDS", 0.5)
                slow = stack.enter_context(connected(made.endpoint))
                if said:
                    slow.sendall(said)
                    assert slow.recv(1 << 16)
                some = question[:-1] if secret is None else b"\x16\x03\x01\x01\x00" + bytes(60)
                slow.settimeout(0.1)
                assert any(gone(slow, bytes([byte])) for byte in some)
            assert asks.ask(made.endpoint, RENEW, deadline=soon()) == OK


def gone(caller: socket.socket, byte: bytes) -> bool:
    """Whether a byte more is one too many."""
    try:
        caller.sendall(byte)
        return not caller.recv(1 << 16)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_a_peer_that_is_silent_between_questions_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with server() as made, channels() as asks:
        asks.ask(made.endpoint, RENEW, deadline=soon())
        monkeypatch.setattr("kvatlas.wire.rpc._STRANGER_SECONDS", 0.1)
        monkeypatch.setattr("kvatlas.wire.connection.FRAME_SECONDS", 0.1)
        time.sleep(0.4)
        assert asks.lost(made.endpoint) == 0
        assert asks.ask(made.endpoint, RENEW, deadline=soon()) == OK


# -- too much to do -----------------------------------------------------------------------


def test_who_is_busy_says_so_and_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.wire.rpc._MAX_ANSWERING", 1)
    monkeypatch.setattr("kvatlas.wire.rpc._BUSY_SECONDS", 0.05)
    begun, going_on = threading.Event(), threading.Event()

    def answer(question: Any, caller: Caller) -> Any:
        del caller
        if question.seconds == 9.0:
            begun.set()
            going_on.wait(20)
        return OK

    with server(answer) as made, channels() as asks:
        slow = protocol.Renew(session=bytes(16), lease=bytes(16), seconds=9.0)
        asking = threading.Thread(target=lambda: asks.ask(made.endpoint, slow, deadline=soon(30)))
        asking.start()
        assert begun.wait(10)
        with Raw(made.endpoint) as raw:
            said = raw.ask(RENEW)
            assert (said.code, said.retry, "Retry after" in said.hint) == ("busy", 0.05, True)
        act = partial(asks.ask, made.endpoint, RENEW, deadline=soon(0.5))
        assert refused(act) in (Code.BUSY, Code.DEADLINE)
        threading.Timer(0.3, going_on.set).start()
        assert asks.ask(made.endpoint, RENEW, deadline=soon(20)) == OK
        asking.join()


def test_connections_are_bounded_for_each_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.wire.rpc._MAX_CONNECTIONS", 4)
    with server() as made, channels() as one, channels() as two, channels() as three:
        one.ask(made.endpoint, RENEW, deadline=soon())
        two.ask(made.endpoint, RENEW, deadline=soon())
        with Raw(made.endpoint) as raw:
            assert raw.ask(RENEW).code == "busy", "two of four may be of one host"
        one.close()
        assert three.ask(made.endpoint, RENEW, deadline=soon()) == OK
        assert two.ask(made.endpoint, RENEW, deadline=soon()) == OK


def test_no_answer_that_fails_ends_more_than_itself() -> None:
    problems: list[Any] = [
        RuntimeError("a defect"), RecursionError(), MemoryError(), KeyError(3), OSError(5, "disk"),
        EOFError(), TimeoutError(), UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
    ]  # fmt: skip
    left = list(problems)

    def answer(*_: Any) -> Any:
        if left:
            raise left.pop()
        return object()

    with server(answer) as made, channels() as asks:
        for _ in range(len(problems) + 1):
            act = partial(asks.ask, made.endpoint, RENEW, deadline=soon())
            assert refused(act) is Code.WIRE_FAILED
        assert asks.lost(made.endpoint) == 0
