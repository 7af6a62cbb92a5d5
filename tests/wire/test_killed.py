"""Processes that are killed or stopped at any moment of a transfer."""

from __future__ import annotations

import random
import signal
import threading
import time
from typing import Any

import pytest

from kvatlas.wire import Session
from tests.wire.child import TOKENS
from tests.wire.helpers import until
from tests.wire.processes import (
    POINTS,
    SOURCE,
    TARGET,
    TRANSPORTS,
    Children,
    Here,
    outcome,
    over,
    works,
)


@over
@pytest.mark.parametrize("point", range(POINTS // len(TRANSPORTS)))
def test_killed_at_any_moment(here: Here, children: Children, point: int) -> None:
    """A transfer of some kind, and the other process dies at some moment of it."""
    rng = random.Random(f"{point} {here.transport}")  # noqa: S311
    way = rng.choice(["pull", "push", "pulled", "pushed"])
    pushes = way.startswith("push")
    how = rng.choice(["direct", "staged", "auto" if pushes else "coalesced", "auto"])
    checksums, stop = rng.random() < 0.3, rng.random() < 0.2
    moment = rng.random() ** 2 * (0.12 if how == "staged" else 0.03)
    child = children.take(SOURCE, here.transport, 1, name="other")
    here.wipe()
    seconds = 1.0 if stop else 20.0  # of a process that was killed, nobody waits for the end
    about: dict[str, Any] = {"how": how, "timeout": seconds, "checksums": checksums}
    there = about | {"endpoints": [here.node.endpoint], "request": "r"}

    def strike() -> None:
        time.sleep(moment)
        child.signal(signal.SIGSTOP if stop else signal.SIGKILL)

    striking = threading.Thread(target=strike)
    if way in ("pull", "push"):
        if way == "pull":
            child.ask("offer", request="r")
        else:
            child.ask(
                "expect", request="r", source=TARGET.to_json().decode(), pushers=[here.node.name]
            )
        with Session(here.node, [child.endpoint]) as session:
            begun = time.monotonic()
            if way == "pull":
                transfer = here.pull(session, **about)
            else:
                transfer = session.push("r", source_blocks=here.blocks, tokens=TOKENS, **about)
            striking.start()
            said = outcome(transfer, begun)
        if way == "pull" and said == "ok":
            here.assert_has(SOURCE, 1)
        assert said in ("ok", "deadline" if stop else "peer_lost")
    else:
        if way == "pulled":
            here.rank.offer("r")
        else:
            expected = here.node.expect("r", here.blocks, TOKENS, source=SOURCE, pushers=["other"])
        child.tell("move", **there, way=way.removesuffix("ed"))
        until(lambda: here.node.metrics.values["messages"] > 0)
        striking.start()
        striking.join()
        here.settled()
        if way == "pushed":
            if expected.ready.is_set():
                here.assert_has(SOURCE, 1)
            here.node.forget("r")
        else:
            here.node.withdraw("r")
            assert [why for _, why in here.rank.released] in (["withdrawn"], ["read"])
            here.rank.released.clear()
    striking.join()
    here.settled()
    works(here, children.take(SOURCE, here.transport, 1, name="other"))
