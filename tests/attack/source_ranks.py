"""A destination in this process, and the ranks of its sources as processes that can be struck."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from kvatlas import AtlasError
from kvatlas.copying.run_bounds import Bytes
from kvatlas.wire import Session
from kvatlas.wire.client.expected import Expected
from tests.attack.claims import SLACK, Attack, Destination
from tests.attack.plans import after, source_ranks_plan
from tests.wire.child import Child, Json, contents
from tests.wire.helpers import waited

LATE = 0.25
"""Seconds that a process has for late bytes once it goes on."""
SECONDS = 30.0
"""Seconds that a transfer has, on a machine that is busy with other things."""
PUSHERS = ("prefill", "spare")
"""The names of the nodes that may push."""


class SourceRanks(Destination):
    """A destination whose sources have two ranks, each rank a process with a role.

    `cast` has the arguments of each role's rank: `rank`, `seed` and `name` at least. The bytes of
    a rank depend on its seed, so that they show which process they came from.
    """

    def __init__(self, attack: Attack, cast: Mapping[str, Json], **node: Any) -> None:
        super().__init__(attack, **node)
        self.source = source_ranks_plan(self.tokens)
        self.cast = cast
        self.children = {role: self.start(role) for role in cast}
        self.clean = contents(self.destination, 7)
        self._right: dict[tuple[int, int], dict[int, Bytes]] = {}

    def start(self, role: str, **changed: Any) -> Child:
        """Start the process of a role."""
        given: Json = {"tokens": self.tokens, "settings": self.wire.settings}
        about = given | self.node | self.cast[role] | changed
        return Child().start(self.source, self.wire.name, **about)

    def __getitem__(self, role: str) -> Child:
        return self.children[role]

    def endpoints(self, *roles: str) -> list[str]:
        return [self[role].endpoint for role in roles]

    def holds(self, seeds: tuple[int, int], fault: str) -> list[str]:
        """Report a fault unless every byte of rank 0 and rank 1 is that of these seeds."""
        return [fault] if self.here.wrong(self.right(seeds)) else []

    def unchanged(self, fault: str) -> list[str]:
        """Report a fault unless the destination's pools are as they were."""
        return [fault] if self.here.wrong(self.clean) else []

    def right(self, seeds: tuple[int, int]) -> dict[int, Bytes]:
        """The destination's pools after a transfer from ranks of these seeds."""
        if seeds not in self._right:
            self._right[seeds] = after(self.source, seeds, self.destination, 7, self.tokens)
        return self._right[seeds]

    def restore(self) -> None:
        """Put the first bytes back into the destination's pools."""
        for index, pool in self.here.pools.items():
            pool[:] = self.clean[index]

    def expect(self, request: str, **about: Any) -> Expected:
        """Expect a request from both ranks in all blocks of the destination."""
        here = self.here
        given: Json = {"source": self.source, "pushers": PUSHERS} | about
        return here.node.expect(request, here.blocks, self.tokens, **given)

    def offer(self, request: str, *roles: str, **about: Any) -> None:
        """Have the ranks of some roles offer a request."""
        for role in roles:
            self[role].ask("offer", request=request, **about)

    def withdraw(self, request: str, *roles: str) -> None:
        for role in roles:
            with suppress(EOFError, OSError):
                self[role].ask("withdraw", request=request)

    def push(self, role: str, request: str, **about: Any) -> None:
        """Have a rank push a request; `Child.heard` returns the outcome."""
        about = {"timeout": SECONDS, "how": self.rng.choice(["direct", "staged"])} | about
        endpoints = [self.here.node.endpoint]
        self[role].tell("move", way="push", endpoints=endpoints, request=request, **about)

    def pushed(self, role: str, request: str, **about: Any) -> str:
        """Have a rank push a request, and wait for the outcome."""
        self.push(role, request, **about)
        return str(self[role].heard()["code"])

    def wait_for_push(self, request: str, rank: int) -> None:
        """Wait until this node reads from a rank that pushes."""
        current = self.here.node.expected[request].current
        assert waited(lambda: bool(current[rank]), SLACK), f"rank {rank} does not begin to push"

    def typical_push(self, role: str) -> float:
        """Seconds between the first and the last byte of a push when nothing is wrong."""
        return min(self._timed_push(role) for _ in range(3))

    def _timed_push(self, role: str) -> float:
        request, rank = self.name(), int(self.cast[role]["rank"])
        expected = self.expect(request)
        self.push(role, request, how="staged")
        self.wait_for_push(request, rank)
        begun = time.monotonic()
        assert waited(lambda: rank in expected.arrived, SECONDS), "a push does not arrive"
        taken = time.monotonic() - begun
        assert self[role].heard()["code"] == "ready"
        self.here.node.forget(request)
        return taken

    def pulls(self, seeds: tuple[int, int], *roles: str, **about: Any) -> list[str]:
        """Pull a request from ranks that are well, as any engine would next."""
        request = self.name()
        self.offer(request, *roles)
        try:
            with Session(self.here.node, self.endpoints(*roles)) as session:
                self.pull(session, request, checksums=True, timeout=SECONDS, **about).wait()
        except AtlasError as refused:
            return [f"the next transfer ended in {refused.code}"]
        finally:
            self.withdraw(request, *roles)
        return self.holds(seeds, "wrong bytes in the next transfer")

    def revived(self) -> list[str]:
        """Let every process go on, replace those that died, and end what a try left open."""
        faults, self.aborts = list[str](), 0
        for child in self.children.values():
            child.go_on()
        for role, child in self.children.items():
            with suppress(EOFError, OSError, AssertionError):
                child.hear_all()
                if child.process.is_alive():
                    continue
            faults += self.ended(child.close(), f"{role} died by itself ({{}})")
            self.children[role] = self.start(role)
        node = self.here.node
        for request in list(node.expected):
            node.forget(request)
        for request in list(node.offers):
            node.withdraw(request)
        self.here.released.clear()
        self.restore()
        return faults

    def close(self) -> list[str]:
        self.aborts, faults = 0, list[str]()
        for role, child in self.children.items():
            faults += self.ended(child.close(), f"{role} ended with {{}}")
        self.here.close()
        return faults
