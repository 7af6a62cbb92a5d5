"""Hosts that fall silent, without a word that ends their connections, are noticed in seconds."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path

from kvatlas.wire import Session
from kvatlas.wire.rpc import Caller, Server
from tests.profiles import DEEP
from tests.wire.child import Rank
from tests.wire.helpers import small, until
from tests.wire.test_connections import OK, RENEW, channels, monitor_code, server, soon

SECRET = b"known to both ends"
SAID = 11
"""Seconds after which docs/how-to/security.md says that a host which vanishes is noticed."""


def connections() -> dict[str, socket.socket]:
    """Every TCP connection that this process has open, each by a descriptor of its own."""
    found: dict[str, socket.socket] = {}
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed by now
            if (name := str(path.readlink())).startswith("socket:"):
                one = socket.socket(fileno=os.dup(int(path.name)))
                if is_connected(one):
                    found[name] = one
                else:
                    one.close()
    return found


def is_connected(one: socket.socket) -> bool:
    try:
        return one.family in (socket.AF_INET, socket.AF_INET6) and bool(one.getpeername())
    except OSError:
        return False


def seconds_to_notice(one: socket.socket) -> int:
    """After how many seconds the kernel gives an idle connection up whose other end is silent."""
    names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
    idle, every, count, most = (one.getsockopt(socket.IPPROTO_TCP, name) for name in names)
    assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    # A probe when it has been idle, and others; with a time-out, the first one past it is the last.
    probes = range(1, 1000) if most else range(count, count + 1)
    return next(idle + n * every for n in probes if 1000 * (idle + n * every) >= most)


def test_both_ends_of_every_connection_have_a_heartbeat() -> None:
    """Of the side channel, and of the transport that is TCP itself; as often as is documented."""
    before = connections()
    ends = [Rank(small("dense"), "tcp", seed, 50, secret=SECRET) for seed in (1, 2)]
    ends[0].offer("r")
    with Session(ends[1].node, [ends[0].node.endpoint]) as session:
        session.pull("r", destination_blocks=ends[1].blocks, tokens=50, how="direct").wait(20)
        made = connections()
        ours = [one for name, one in made.items() if name not in before]
        ways = [(one.getsockname(), one.getpeername()) for one in ours]
        assert len(ways) >= 4, "two ends of the side channel, and two of the transport"
        assert {way[::-1] for way in ways} == set(ways), "both ends are here"
        assert {seconds_to_notice(one) for one in ours} == {SAID}
    for one in [*before.values(), *made.values()]:
        one.close()
    for end in ends:
        end.close()
    said = Path(__file__).parents[2].joinpath("docs/how-to/security.md").read_text()
    assert f"by keepalive, after about {SAID} seconds" in said


def fall_silent(one: socket.socket) -> None:
    """Have the kernel drop whatever comes for a socket, as if its host had gone."""
    nothing = struct.pack("HBBI", 6, 0, 0, 0)  # a filter of one instruction: keep 0 bytes
    kept = ctypes.create_string_buffer(nothing, len(nothing))
    program = struct.pack("HxxxxxxP", 1, ctypes.addressof(kept))
    one.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER


def hurry(one: socket.socket) -> None:
    """Notice after two seconds what takes eleven."""
    for name, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1)):
        one.setsockopt(socket.IPPROTO_TCP, name, value)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1500)


def test_a_host_that_falls_silent_is_noticed() -> None:
    """By who asks and by who answers; in the deep profile with heartbeats as they are."""
    gone: list[Caller] = []
    before = connections()
    with server(closed=gone.append) as one, server() as two, channels() as asks:
        for made in (one, two):
            assert asks.ask(made.endpoint, RENEW, deadline=soon()) == OK
        monitor = asks.monitor(two.endpoint)
        opened = [each for name, each in connections().items() if name not in before]
        if not DEEP:
            for each in opened:
                hurry(each)
        begun = time.monotonic()
        for each in opened:
            if each.getpeername()[1] == port_of(one) or each.getsockname()[1] == port_of(two):
                fall_silent(each)
        until(lambda: bool(gone) and monitor_code(monitor) == "peer_lost", 3 * SAID)
        assert not DEEP or time.monotonic() - begun > SAID - 4
        for each in [*before.values(), *opened]:
            each.close()


def port_of(made: Server) -> int:
    return int(made.endpoint.rpartition(":")[2])
