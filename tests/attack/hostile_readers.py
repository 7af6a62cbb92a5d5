"""Peers with the secret that read what they have no lease for, over a transport that asks."""

from __future__ import annotations

import random
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from kvatlas.copying.memory import STAGING
from kvatlas.errors import Code
from kvatlas.routing import route
from kvatlas.wire import Session, protocol
from tests.attack.claims import Attack, Outcome
from tests.attack.plans import after, source_plan, target_plan
from tests.wire.child import Rank
from tests.wire.data_plane import SECRET, ask, code_of_read, one_run, open_lease

READS = 40
"""Reads of a hostile peer in one try, at random places."""


def hostile_readers(attack: Attack) -> Outcome:
    """A peer reads the bytes of its own lease, and no byte of a request for another."""
    outcome, rng = Outcome(noted=attack.noted), attack.rng
    with ExitStack() as stack:
        source, named, hostile = (_rank(attack, seed) for seed in (1, 7, 8))
        for one in (source, named, hostile):
            stack.callback(one.close)
        right = after(source.plan, 1, named.plan, 7, attack.tokens)
        own, theirs = (
            stack.enter_context(Session(one.node, [source.node.endpoint]))
            for one in (hostile, named)
        )
        for number in range(attack.tries):
            source.offer(f"named {number}", readers=["node-7"])
            source.offer(f"open {number}", tokens=attack.tokens // 2)
            transfer = theirs.pull(
                f"named {number}",
                destination_blocks=named.blocks,
                tokens=attack.tokens,
                how="staged",
            )
            faults = _strike(source, hostile, own, f"open {number}", rng)
            transfer.wait(30)
            if named.wrong(right):
                faults.append("wrong bytes at the reader that was named")
            named.fill(7)
            source.node.withdraw(f"open {number}")
            outcome.add(faults)
    return outcome


def _rank(attack: Attack, seed: int) -> Rank:
    plan = source_plan(attack.tokens) if seed == 1 else target_plan(attack.tokens)
    return Rank(plan, attack.wire.name, seed, attack.tokens, secret=SECRET, **attack.wire.node)


def _strike(
    source: Rank, hostile: Rank, session: Session, request: str, rng: random.Random
) -> list[str]:
    """Read at random with a lease for half of the tokens, and once more after it has ended."""
    faults, half = [], source.tokens // 2
    lease = open_lease(session, hostile, request, stop=half)
    lent = ask(session, protocol.Borrow, lease=lease, buffers=1, seconds=2.0).buffers
    covered = {0: _covered(source, hostile, half), STAGING: _lent(source, lent)}
    for _ in range(READS):
        region = rng.choice((0, 0, 0, STAGING))
        bytes_of = covered[region]
        length = rng.choice((1, 64, 4096))
        start = rng.randrange(len(bytes_of) - length)
        allowed = bool(bytes_of[start : start + length].all())
        found = code_of_read(session, one_run(region, start, length), lease)
        if allowed != (found is None):
            faults.append(f"a read that is {'' if allowed else 'not '}allowed ended in {found}")
    ask(session, protocol.Close, lease=lease, complete=False)
    if code_of_read(session, one_run(0, 0), lease) is not Code.LEASE_EXPIRED:
        faults.append("a read with a lease that has ended")
    return faults


def _covered(source: Rank, hostile: Rank, tokens: int) -> NDArray[np.bool_]:
    """The bytes of the source's pool that belong to some tokens, run by run."""
    covered = np.zeros(source.pools[0].size, dtype=bool)
    bound = route(source.plan, hostile.plan).bind(
        source_rank=0,
        destination_rank=0,
        source_blocks=source.blocks,
        destination_blocks=hostile.blocks,
        tokens=tokens,
    )
    for copy in bound.copies:
        for start, length in zip(copy.source.tolist(), copy.length.tolist(), strict=True):
            covered[start : start + length] = True
    return covered


def _lent(source: Rank, buffers: tuple[int, ...]) -> NDArray[np.bool_]:
    staging = source.node.staging
    covered = np.zeros(staging.count * staging.piece, dtype=bool)
    for one in buffers:
        covered[one * staging.piece : (one + 1) * staging.piece] = True
    return covered
