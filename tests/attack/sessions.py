"""Thousands of sessions, one after the other and all of them closed: the next is welcome."""

from __future__ import annotations

from kvatlas.errors import AtlasError
from kvatlas.wire import Session
from tests.attack.claims import Attack, Outcome
from tests.attack.left_open import open_things
from tests.attack.plans import after, source_plan, target_plan
from tests.wire.child import Child, Rank
from tests.wire.helpers import waited

MOST = 4_200
"""A node over shared memory once refused everybody after 4,097."""
_TOKENS, _NOISE = 32, 8


def thousands_of_sessions(attack: Attack) -> Outcome:
    """Nobody is refused, nothing stays open at either end, and the last session moves bytes."""
    outcome = Outcome()
    src, dst = source_plan(_TOKENS), target_plan(_TOKENS)
    about = {"tokens": _TOKENS, "settings": attack.wire.settings} | attack.wire.node
    far = Child().start(src, attack.wire.name, 1, **about)
    here = Rank(dst, attack.wire.name, 7, _TOKENS, **attack.wire.node)
    endpoint, opened = [far.endpoint], 0
    Session(here.node, endpoint).close()  # opens what stays open
    before = open_things()
    try:
        while opened < MOST:
            with Session(here.node, endpoint) as session:
                session.link(0).check()
            opened += 1
            outcome.add([])
    except AtlasError as refused:
        outcome.add([f"session {opened + 1} was refused: {refused.code}"])
    far.ask("offer", request="last")
    with Session(here.node, endpoint) as session:
        session.pull("last", destination_blocks=here.blocks, tokens=_TOKENS).wait(20)
    right = not here.wrong(after(src, 1, dst, 7, _TOKENS))
    outcome.add([] if right else ["wrong bytes in the last session"])
    settled = waited(
        lambda: all(many - before[what] <= _NOISE for what, many in open_things().items()), 20
    )
    outcome.add([] if settled else ["descriptors or segments are left"])
    here.close()
    outcome.add([] if far.close() == 0 else ["the other process did not end well"])
    return outcome
