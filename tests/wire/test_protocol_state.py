"""Real nodes do what the protocol model says, in any order of events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvatlas.wire.block_ledger import BlockClaim, BlockLedger
from kvatlas.wire.client import expected as expected_module
from kvatlas.wire.client.expected import Announcement, Expected, ExpectedRequests
from kvatlas.wire.client.rank_lease import RankLease
from kvatlas.wire.peers import Peer
from tests.wire.model_driver import Driver, Nodes, piece_bytes
from tests.wire.protocol_model import (
    BLOCKS,
    BLOCKS_OF,
    NEW,
    OLD,
    ONE,
    STRANGER,
    Event,
    Model,
    World,
)

PUSHERS = (OLD, NEW, ONE, STRANGER)
FAULTS = ("stop old", "stop source", "kill old", "expire old", "expire new", "expire one")
UNBOUNDED: dict[str, Any] = {"attempts": 1000, "expectations": 1000, "rewrites": 1000}
PUSHES = World(pushers=PUSHERS, engine=False, faults=frozenset(FAULTS), **UNBOUNDED)
PULLS = World(pulls=("a", "b"), offers=True, faults=frozenset({"stop source"}), **UNBOUNDED)
BOTH = replace(PUSHES, pulls=PULLS.pulls, offers=True, engine=True)
DEEP = settings().max_examples > 1000
"""Whether the `deep` profile of hypothesis is in use."""
PUSHING = {"announce", "land"}
DISTURBING = {"kill", "expire", "forget"}
GROUPS = (
    {"pull", "land"},
    {"expect", "use", "offer", "rewrite"},
    {"cancel", "sever", "withdraw"},
    {"announce"},
    {"start", "stop", "continue"},
)
CALM_STEPS = 4
"""Rules between two that end a push, so that many pushes end well."""


class Protocol(RuleBasedStateMachine):
    """Real nodes and the model, step by step."""

    worlds: ClassVar[tuple[World, ...]] = (PUSHES, PULLS, BOTH)
    nodes: ClassVar[Nodes | None] = None
    """Nodes that serve every run until one fails."""
    reached: ClassVar[Counter[str]] = Counter()
    """How often the steps that matter were taken, over all runs."""

    def __init__(self) -> None:
        super().__init__()
        mine = type(self)
        mine.nodes = mine.nodes or Nodes()
        self.driver = Driver(mine.nodes)
        self.sound = True

    @initialize(data=st.data())
    def choose_world(self, data: st.DataObject) -> None:
        self.model = Model(data.draw(st.sampled_from(self.worlds)))
        self.state = self.model.first
        self.calm = 0

    def _possible(self, actions: set[str], who: str = "") -> list[Event]:
        events = self.model.possible(self.state)
        return [one for one in events if one.action in actions and who in ("", one.who)]

    def _take(self, event: Event) -> None:
        """Take a step, and compare everything afterwards."""
        self.sound = False
        self._step(event)
        for event in self._possible({"confirm"}):
            self._step(event)  # a pull sends it without a pause
        self.driver.check(self.state)
        self.sound = True

    def _step(self, event: Event) -> None:
        before = self.state
        self.state, right = self.model.step(before, event)
        if event.action == "use":
            owned = {block for _, owner in before.claims for block in BLOCKS_OF[owner]}
            self.driver.use(set(range(BLOCKS)) - owned)
            return
        if event.action == "land" and event.who in self.model.world.pulls:
            pull = before.pulls[self.model.index[event.who]]
            self.driver.pulled(event.who, pull.landed)
        outcome = self.driver.step(event)
        note(f"{event}: {outcome}")
        self.reached[f"{event.action}: {outcome}"] += 1
        self.reached["ready"] += self.state.ready and not before.ready
        ended = [
            one for one in before.parts if one.live and one._replace(live=False) in self.state.parts
        ]
        self.reached["replaced"] += event.action == "announce" and bool(ended)
        late = [one for one in before.parts if one.posted and not one.live]
        own = [self.model.world.pushers[one.pusher].name for one in late]
        self.reached["late"] += event.action == "land" and event.who in own
        assert outcome == right, f"{event}: {outcome} instead of {right}"

    @rule(data=st.data(), times=st.sampled_from([1, 2, 6]))
    @precondition(lambda self: self.state.expecting and self._possible(PUSHING))
    def push(self, data: st.DataObject, times: int) -> None:
        """Let a pusher go on with its push for some steps."""
        event = data.draw(st.sampled_from(self._possible(PUSHING)))
        for _ in range(times):
            self._take(event)
            following = self._possible({"land"}, event.who)
            if not following:
                break
            event = following[0]
        self.calm += 1

    @rule(data=st.data())
    @precondition(lambda self: any(map(self._possible, GROUPS)))
    def act(self, data: st.DataObject) -> None:
        groups = [events for actions in GROUPS if (events := self._possible(actions))]
        self._take(data.draw(st.sampled_from(data.draw(st.sampled_from(groups)))))
        self.calm += 1

    @rule(data=st.data())
    @precondition(lambda self: self.calm >= CALM_STEPS and self._possible(DISTURBING | PUSHING))
    def disturb(self, data: st.DataObject) -> None:
        """End a push, or send a message of one that nobody expects."""
        self._take(data.draw(st.sampled_from(self._possible(DISTURBING | PUSHING))))
        self.calm = 0

    def teardown(self) -> None:
        if self.sound:
            self.driver.end()
            return
        with suppress(AssertionError):
            self.driver.interrupt()
        self.driver.nodes.close()
        type(self).nodes = None


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Protocol]]:
    monkeypatch.setattr("kvatlas.wire.client.pull_pipeline.piece_bytes", piece_bytes)
    monkeypatch.setattr("kvatlas.wire.client.expected._LONGEST_WAIT", 0.0)
    made: type[Protocol] = type("Protocol", (Protocol,), {"reached": Counter()})
    yield made
    if made.nodes is not None:
        made.nodes.close()


def run(machine: type[Protocol], **about: Any) -> None:
    given: dict[str, Any] = {"deadline": None, "stateful_step_count": 50}
    given["suppress_health_check"] = list(HealthCheck)
    run_state_machine_as_test(machine, settings=settings(**given | about))


def test_nodes_do_what_the_model_does(machine: type[Protocol]) -> None:
    run(machine, max_examples=2000 if DEEP else 40, derandomize=not DEEP)
    print(dict(machine.reached))
    taken = set(+machine.reached)
    assert {"ready", "replaced", "confirm: ok", "sever: ok"} <= taken, "the runs are too short"
    assert {"late", "expire: ok", "kill: ok"} <= taken, "the runs are too short"
    assert {"pull: blocks_in_use", "offer: blocks_in_use"} <= taken, "the runs are too short"


def grant(ledger: BlockLedger, use: Any, request: str, blocks: Any) -> BlockClaim:
    """Grant a claim whatever the ledger contains."""
    ledger._generation += 1
    claim = BlockClaim(ledger, ledger._generation, use, request, blocks)
    ledger._claims[claim.generation] = claim
    return claim


def name_is_enough(expected: Expected, peer: Peer) -> bool:
    return peer.name in expected.pushers


def rank_is_enough(expected: Expected, peer: Peer) -> bool:
    return peer.rank not in expected.arrived


def begin_at_once(expected: ExpectedRequests, request: Expected, one: Announcement) -> None:
    """Read from a pusher without ending older reads of its rank."""
    del expected
    request.connecting.remove(one)
    request.current[one.peer.rank].append(one)


Removed = tuple[World, Any, str, Callable[..., Any]]
REMOVED: dict[str, Removed] = {
    "fence": (PUSHES, ExpectedRequests, "_replace_older", begin_at_once),
    "settle": (PUSHES, expected_module, "_all_released", lambda *_: True),
    "arrival is final": (PUSHES, Expected, "may_be_pushed_by", name_is_enough),
    "named pushers": (PUSHES, Expected, "may_be_pushed_by", rank_is_enough),
    "claims": (PULLS, BlockLedger, "claim", grant),
    "claims of both": (BOTH, BlockLedger, "claim", grant),
    "quarantine": (PULLS, BlockClaim, "quarantine", BlockClaim.release),
    "confirm": (PULLS, RankLease, "close", lambda *_, **__: None),
}


@pytest.mark.parametrize("rule", REMOVED if DEEP else ("named pushers", "claims", "quarantine"))
def test_a_node_without_a_rule_is_caught(
    rule: str, machine: type[Protocol], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, where, name, act = REMOVED[rule]
    monkeypatch.setattr(where, name, act)
    monkeypatch.setattr(machine, "worlds", (world,))
    with pytest.raises((AssertionError, Flaky)):  # it may depend on which thread is faster
        run(
            machine,
            max_examples=300,
            phases=[Phase.generate],
            derandomize=True,
            report_multiple_bugs=False,
            database=None,
        )
