"""A peer beside a pull from ranks that share staging alone: it reads and changes nothing."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from kvatlas import AtlasError, Code
from kvatlas.copying.memory import STAGING
from kvatlas.routing import Copy
from kvatlas.wire import Link, Session
from tests.attack.claims import SLACK, Attack, Outcome, code_of, repeated_in
from tests.attack.source_ranks import SECONDS, SourceRanks
from tests.wire.child import Json, Rank

_RANKS = ("one 0", "one 1")
_CAST: dict[str, Json] = {
    role: {"rank": rank, "seed": 1, "name": "one"} for rank, role in enumerate(_RANKS)
}
_SPAN = 64 << 10
_READER = "node-7"
"""The name of the destination in this process."""


class _Scene(SourceRanks):
    """Two source ranks, their reader, and a peer that they offer nothing to."""

    def __init__(self, attack: Attack) -> None:
        super().__init__(attack, _CAST)
        self.snoop = Rank(
            self.destination, self.wire.name, 9, self.tokens, name="snoop", **self.node
        )

    def close(self) -> list[str]:
        self.snoop.close()
        return super().close()


def separate_peers(attack: Attack) -> Outcome:
    """A peer that `readers=` excludes sees and changes no byte, while another pulls and after."""
    private = replace(attack.wire, options=attack.wire.options | {"shared": "staging"})
    attack = replace(attack, wire=private)
    return repeated_in(_Scene(attack), attack, _snooped)


def _snooped(scene: _Scene) -> tuple[list[str], bool]:
    request, faults = scene.name(), list[str]()
    scene.offer(request, *_RANKS, readers=[_READER])
    endpoints, seen = scene.endpoints(*_RANKS), _Seen(scene)
    with ExitStack() as stack:
        session = stack.enter_context(Session(scene.here.node, endpoints))
        other = stack.enter_context(Session(scene.snoop.node, endpoints))
        about: Json = {
            "destination_blocks": scene.snoop.blocks,
            "tokens": scene.tokens,
            "timeout": SECONDS,
        }
        if (code := code_of(other.pull(request, **about), SECONDS)) != "unknown_request":
            faults.append(f"a pull of what is offered to another ended in {code}")
        thread = threading.Thread(target=seen.look, args=[[other.link(rank) for rank in (0, 1)]])
        thread.start()
        try:
            transfer = scene.pull(session, request, timeout=SECONDS)
            code = code_of(transfer, SECONDS + SLACK)
        finally:
            seen.done.set()
            thread.join()
        seen.look([other.link(rank) for rank in (0, 1)])  # once more, after it
    if code != "ready":
        faults.append(f"a pull beside another peer ended in {code}")
    else:
        faults += scene.holds((1, 1), "wrong bytes in a pull that is ready")
    if seen.nbytes:
        faults.append("a peer has seen bytes of another's request")
    scene.withdraw(request, *_RANKS)
    return faults + scene.nothing_left(), seen.turns > 1


class _Seen:
    """What a peer finds in memory that it reaches. It writes noise there as well."""

    def __init__(self, scene: _Scene) -> None:
        self._room = scene.snoop.node.staging
        self._spoils = scene.rng.random() < 0.5
        self.done = threading.Event()
        self.nbytes = self.turns = 0

    def look(self, links: list[Link]) -> None:
        """Look at everything, again and again until it is done."""
        while True:
            for link in links:
                for pool, region in link.peer_memory.items():
                    for start in range(0, region.nbytes - _SPAN + 1, _SPAN):
                        self._look_at(link, pool, start)
                self._try_beyond(link)
            self.turns += 1
            if self.done.is_set():
                return

    def _look_at(self, link: Link, pool: int, start: int) -> None:
        try:
            link.read([_run(pool, start, STAGING, 0, _SPAN)]).wait(float("inf"))
        except AtlasError as refusal:
            if refusal.code is not Code.LEASE_EXPIRED:  # tcp serves no byte without a lease
                raise
            return
        self.nbytes += int(np.count_nonzero(self._room.view(0, _SPAN)))
        mapped = getattr(link, "mapped", {}).get(pool)
        if self._spoils and mapped is not None and mapped.flags.writeable:
            mapped[start : start + _SPAN] = 0x5A

    def _try_beyond(self, link: Link) -> None:
        """Read what the peer was told nothing of."""
        for pool in (STAGING, 0):
            if pool not in link.peer_memory:
                try:
                    link.read([_run(pool, 0, STAGING, 0, _SPAN)]).wait(float("inf"))
                except AtlasError:
                    continue
                self.nbytes += _SPAN


def _run(src: int, at: int, dst: int, to: int, nbytes: int) -> Copy:
    return Copy(src, dst, np.array([at]), np.array([to]), np.array([nbytes]))
