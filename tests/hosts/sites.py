"""Sources and a destination on the hosts of a network, and what must be true after a transfer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from kvatlas.planning import Plan, plan
from kvatlas.specs import FullAttention, Spec
from tests.hosts.member import READY, Compared, Member, Outcome
from tests.hosts.networks import DEVICE, Network
from tests.planning.models import model_of

TOKENS = 500
SLACK = 5.0
"""Seconds more than documented after which something counts as hanging: the machine may be busy."""
NOTICED = 11.0
"""Seconds after which keepalive reports a vanished host."""
FREED = NOTICED + 3.0
"""Seconds after which a source frees the lease of a vanished host: a session outlives its last
connection by three seconds."""
RESTS = 10.0
"""Seconds after which a link whose reads do not end is torn down."""
FAILURES = ("deadline", "peer_lost", "wire_failed", "lease_expired")
"""The codes with which a network fault may end a transfer."""

_LAYER: dict[str, Spec] = {"attn": FullAttention(heads=4, head_dim=64)}
_MODEL = model_of("hosts", *[_LAYER] * 4)
_SECRET = b"a secret of the tests of hosts"
_UNPROTECTED = ("nixl", "mooncake")
"""Transports whose own connections are not encrypted between hosts."""


def _planned(**given: Any) -> Plan:
    about: dict[str, Any] = {"memory": "6MiB", "max_len": 512, "in_flight": 0}
    return plan(_MODEL, **about | given)


SOURCES = {1: _planned(layout="LBNHC"), 2: _planned(layout="BLHNC", tp=2, block_size=64)}
"""The source's plan by its number of ranks; each has another layout than the destination."""
TARGET = _planned(layout="BHLNC", block_size=32)


class Way(NamedTuple):
    """How bytes travel: a transport and the ranks of the source."""

    transport: str
    ranks: int


class Site:
    """Members on the hosts of a network."""

    def __init__(self, network: Network, way: Way) -> None:
        self.network, self.way = network, way
        self.plan = SOURCES[way.ranks]
        self.members: list[Member] = []
        self._requests = 0

    def source(self, host: int = 0, *, number: int = 1, name: str = "source") -> list[Member]:
        """Start all ranks of a source on a host. Their pools have the oracle's values."""
        ranks = [
            self._start(self.plan, host, number, seed=1, rank=rank, name=f"{name}-{rank}")
            for rank in range(self.way.ranks)
        ]
        for member in ranks:
            member.tell("hold", TARGET.to_json().decode())
        for member in ranks:
            member.hear()
        return ranks

    def target(self, host: int = 1, *, name: str = "target") -> Member:
        """Start the destination on a host."""
        return self._start(TARGET, host, 1, seed=7, rank=0, name=name)

    def _start(self, plan: Plan, host: int, number: int, seed: int, **about: Any) -> Member:
        transport, address = self.way.transport, self.network.address(host, number)
        options = {"host": address}
        if transport == "nixl":
            options = {"device": DEVICE, "over_tcp": True}  # type: ignore[dict-item]
        node = {
            "listen": f"tcp://{address}:0", "secret": _SECRET, "piece": 256 << 10, "buffers": 4,
            "tokens": TOKENS, "options": options, "unprotected": transport in _UNPROTECTED,
        }  # fmt: skip
        member = Member(self.network.hosts[host])
        self.members.append(member)
        given = plan.to_json().decode(), transport, seed, node | about
        member.endpoint = member.ask("start", *given)
        return member

    def offer(self, sources: list[Member]) -> str:
        """Offer a new request at all ranks, and return its name."""
        self._requests += 1
        request = f"request {self._requests}"
        for member in sources:
            member.ask("offer", request)
        return request

    def connect(self, target: Member, sources: list[Member]) -> None:
        """Open a session of the destination with sources."""
        outcome = target.ask("connect", [one.endpoint for one in sources], 20.0)
        assert outcome.code == READY, outcome

    def pull(self, target: Member, sources: list[Member], **about: Any) -> str:
        """Start a pull of a new request into clean pools, and return the request's name."""
        target.ask("wipe")
        request = self.offer(sources)
        target.ask("pull", request, {"timeout": 30.0} | about)
        return request

    def arrives(self, target: Member, sources: list[Member], **about: Any) -> Outcome:
        """Pull a request, which must arrive with every byte and leave nothing behind."""
        before = sources[0].ask("sent")
        self.pull(target, sources, **about)
        outcome: Outcome = target.ask("end")
        assert outcome.code == READY, outcome
        self.assert_arrived(target, sources)
        sent = sources[0].ask("sent") - before
        assert sent >= outcome.nbytes > 0, f"the device sent {sent} of {outcome.nbytes} bytes"
        return outcome

    def works(self, target: Member, sources: list[Member]) -> None:
        """Connect again, without limits, and pull into the same blocks: no trace is left."""
        self.network.lift_limits()
        self.connect(target, sources)
        for how in ("direct", "staged"):
            self.arrives(target, sources, how=how)

    def assert_arrived(self, target: Member, sources: list[Member]) -> None:
        """Every element is where the oracle has it, no other byte changed, and no lease is left."""
        assert self.compare(target) == Compared(missing=0, wrong=0)
        until(lambda: not any(left(target, *sources)))
        assert [member.ask("changed") for member in sources] == [0] * len(sources)

    def assert_failed(self, target: Member, outcome: Outcome, seconds: float) -> None:
        """It ended in time with a code, no byte is wrong, and its blocks can be used again."""
        assert outcome.code in FAILURES, outcome
        assert outcome.seconds < seconds + SLACK, outcome
        assert self.compare(target).wrong == 0
        assert target.ask("released", RESTS + SLACK), "the blocks stay in quarantine"
        assert self.compare(target).wrong == 0

    def expect_push(self, target: Member) -> None:
        """Have a destination expect a push from all ranks of the source."""
        names = [f"source-{rank}" for rank in range(self.way.ranks)]
        target.ask("expect", "pushed", self.plan.to_json().decode(), names)

    def compare(self, target: Member) -> Compared:
        """Compare the destination's pools with the oracle."""
        compared: Compared = target.ask("compare", self.plan.to_json().decode())
        return compared

    def close(self) -> None:
        """End all members."""
        problems = []
        for member in self.members:
            try:
                member.close()
            except AssertionError as problem:
                problems.append(str(problem))
        assert not problems, problems


def left(*members: Member) -> list[int]:
    """How much members still have leased, lent, quarantined or claimed."""
    return [number for member in members for number in member.ask("left").values()]


def until(true: Callable[[], bool], seconds: float = RESTS + SLACK) -> float:
    """Wait until something is true, and return how many seconds that took."""
    begun = time.monotonic()
    while not true():
        assert time.monotonic() < begun + seconds, f"not within {seconds} s"
        time.sleep(0.02)
    return time.monotonic() - begun
