"""The rules of block ownership: complete together, and each one necessary."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings

from tests.wire.protocol_model import (
    EXPIRED,
    IN_USE,
    NEW,
    NEW_ONE,
    OK,
    OLD,
    ONE,
    STRANGER,
    UNKNOWN,
    Event,
    Model,
    Rules,
    Search,
    World,
    search,
)

DEEP = settings().max_examples > 1000
"""Whether the `deep` profile of hypothesis is in use."""

PUSHES = World(
    pushers=(OLD, NEW, ONE), engine=False, faults=frozenset({"stop old", "kill old", "expire one"})
)
REPLACED = replace(PUSHES, faults=frozenset({"stop old"}))
STRANGERS = World(pushers=(OLD, STRANGER, ONE), engine=False, attempts=2)
PULLS = World(pulls=("a", "b"), offers=True, faults=frozenset({"stop source"}))
STAGED = World(pulls=("a", "b"), staged=True, faults=frozenset({"stop source"}))
WORLDS = {
    "pushes": PUSHES,
    "replaced": replace(REPLACED, attempts=2),
    "strangers": STRANGERS,
    "expected twice": World(pushers=(OLD, ONE), expectations=2, faults=frozenset({"expire old"})),
    "pulls": PULLS,
    "staged pulls": STAGED,
    "pushes and pulls": World(pushers=(OLD, ONE), pulls=("b",), rewrites=0),
}
DEEP_WORLDS = {
    "both replaced": replace(
        PUSHES,
        pushers=(OLD, NEW, ONE, NEW_ONE),
        faults=frozenset({"stop old", "stop one"}),
    ),
    "all faults": replace(
        PUSHES,
        engine=True,
        faults=frozenset({"stop old", "kill old", "expire old", "stop one", "kill one"}),
    ),
    "second attempts": World(pushers=(OLD, ONE), expectations=2, attempts=2),
    "replaced twice": replace(REPLACED, attempts=2, expectations=2),
    "engine in between": replace(REPLACED, attempts=2, expectations=2, engine=True),
    "second pulls": replace(PULLS, attempts=2, rewrites=2),
    "second staged pulls": replace(STAGED, attempts=2, rewrites=2, offers=True),
    "everything": World(pushers=(OLD, ONE), pulls=("b",), offers=True),
}


def shown(found: Search) -> list[str]:
    """Print a trace, so that a failed test shows it, and return its events."""
    print(found)
    return [str(event) for event in found.trace]


def outcomes(model: Model, *events: str) -> tuple[list[str], list[str]]:
    """Replay events; return the outcome of each, and the invariants that are broken at the end."""
    state, seen = model.first, []
    for event in events:
        step = Event(*event.split(" ", 1))
        assert step in set(model.possible(state)), f"{step} is not possible"
        state, outcome = model.step(state, step)
        seen.append(outcome)
    return seen, model.violations(state)


@pytest.mark.parametrize("name", [*WORLDS, *(DEEP_WORLDS if DEEP else ())])
def test_no_reachable_state_breaks_an_invariant(name: str) -> None:
    found = search(Model((WORLDS | DEEP_WORLDS)[name]))
    print(found)
    assert found.violation == ""
    assert found.states > 300, "the world has too few events to show anything"


def test_without_fence_two_processes_fill_one_rank() -> None:
    found = search(Model(REPLACED, Rules(fence=False)), {"wrong bytes"})
    trace = shown(found)
    assert found.violation == "wrong bytes"
    assert {"stop old", "start new", "continue old", "announce old", "announce new"} <= set(trace)


PUSH_OF_ONE = ("announce one", "land one", "land one", "confirm one")
REPLACEMENT = ("expect", "announce old", "stop old", "start new", "announce new")
PUSH_OF_NEW = ("land new", "land new", "confirm new")


def test_a_stopped_process_cannot_add_bytes_after_its_replacement() -> None:
    """The replacement reads once the read from the stopped process is known to be over."""
    model = Model(REPLACED)
    events = (*REPLACEMENT, "sever old", *PUSH_OF_NEW, "continue old", *PUSH_OF_ONE)
    assert outcomes(model, *events) == ([OK] * len(events), [])
    late = (*REPLACEMENT, "continue old", "land old", *PUSH_OF_NEW, *PUSH_OF_ONE)
    assert outcomes(model, *late) == ([OK] * len(late), [])
    with pytest.raises(AssertionError, match="land new is not possible"):
        outcomes(model, *REPLACEMENT, *PUSH_OF_NEW)
    for rules in (Rules(fence=False), Rules(settle=False)):
        events = (*REPLACEMENT, *PUSH_OF_NEW, *PUSH_OF_ONE, "continue old", "land old")
        seen, broken = outcomes(Model(REPLACED, rules), *events)
        assert set(seen) == {OK}
        assert "wrong bytes" in broken


def test_a_push_whose_offer_has_ended_does_not_arrive() -> None:
    events = ("expect", "announce one", "land one", "expire one", "land one", "confirm one")
    assert outcomes(Model(PUSHES), *events) == ([OK] * 5 + [EXPIRED], [])


def test_without_final_arrivals_an_announcement_loses_one() -> None:
    found = search(Model(REPLACED, Rules(arrival_is_final=False)), {"lost arrival"})
    trace = shown(found)
    assert found.violation == "lost arrival"
    assert trace.index("confirm old") < trace.index("announce new"), "it resets the arrival"
    assert "land new" not in trace, "a bare announcement is enough"
    assert trace[-1] == "confirm one", "both ranks were told that they are complete"


def test_without_named_pushers_a_stranger_makes_a_request_ready() -> None:
    found = search(Model(STRANGERS, Rules(named_pushers=False)))
    trace = shown(found)
    assert found.violation == "unnamed pusher"
    assert "confirm stranger" in trace
    assert outcomes(Model(STRANGERS), "expect", "announce stranger") == ([OK, UNKNOWN], [])


def test_without_claims_two_pulls_fill_one_block() -> None:
    world = replace(PULLS, offers=False, engine=False, rewrites=0)
    found = search(Model(world, Rules(claims=False)), {"wrong bytes"})
    trace = shown(found)
    assert found.violation == "wrong bytes"
    assert {"pull a", "pull b", "land a", "land b"} <= set(trace)
    assert any(event.startswith("confirm") for event in trace)
    assert outcomes(Model(world), "pull a", "pull b") == ([OK, IN_USE], [])


def test_without_claims_a_pull_changes_an_offered_block() -> None:
    world = World(pulls=("b",), offers=True, engine=False, rewrites=0)
    found = search(Model(world, Rules(claims=False)), {"wrong bytes"})
    trace = shown(found)
    assert found.violation == "wrong bytes"
    assert sorted(trace) == ["land b", "offer own", "pull b"]
    assert outcomes(Model(world), "offer own", "pull b") == ([OK, IN_USE], [])
    assert outcomes(Model(world), "pull b", "offer own") == ([OK, IN_USE], [])


def test_without_claims_a_pull_fills_expected_blocks() -> None:
    world = World(pushers=(OLD, ONE), pulls=("b",), engine=False, rewrites=0)
    found = search(Model(world, Rules(claims=False)), {"wrong bytes"})
    trace = shown(found)
    assert found.violation == "wrong bytes"
    assert {"expect", "pull b"} <= set(trace)


def test_without_quarantine_a_late_read_reaches_freed_blocks() -> None:
    found = search(Model(PULLS, Rules(quarantine=False)), {"wrong bytes"})
    trace = shown(found)
    assert found.violation == "wrong bytes"
    assert [event.split()[0] for event in trace] == ["pull", "cancel", "use", "land"]


def test_without_confirmation_a_pull_is_ready_with_reused_blocks() -> None:
    found = search(Model(PULLS, Rules(confirm=False)), {"wrong bytes"})
    trace = shown(found)
    assert found.violation == "wrong bytes"
    assert trace.index("withdraw source") < trace.index("rewrite source")
    assert trace[-1].startswith("confirm")


def test_without_quarantined_buffers_a_late_read_reaches_another_pull() -> None:
    world = replace(STAGED, attempts=2)
    found = search(Model(world, Rules(buffers=False)), {"wrong bytes"})
    trace = shown(found)
    assert found.violation == "wrong bytes"
    first = next(event.split()[1] for event in trace if event.startswith("cancel"))
    assert trace.index(f"cancel {first}") < trace.index(f"land {first}")
    assert trace[-1].startswith("confirm")


def test_a_caller_that_does_not_wait_for_its_workers_frees_blocks_too_early() -> None:
    found = search(Model(STAGED, Rules(busy=False)), {"wrong bytes"})
    trace = shown(found)
    assert found.violation == "wrong bytes"
    acts = [event.split()[0] for event in trace]
    assert acts == ["pull", "land", "place", "cancel", "use", "placed"]


@pytest.mark.parametrize("broken", ["late write", "wrong bytes"])
def test_whoever_ends_a_read_must_wait_until_it_is_over(broken: str) -> None:
    world = replace(REPLACED, engine=True)
    found = search(Model(world, Rules(settle=False)), {broken})
    trace = shown(found)
    assert found.violation == broken
    ends = [trace.index(event) for event in ("forget", "announce new") if event in trace]
    assert trace.index("announce old") < min(ends) < trace.index("land old")
