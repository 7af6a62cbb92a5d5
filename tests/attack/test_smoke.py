"""A very small part of the attacks, so that the suite itself stays in order."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from kvatlas.geometry import StateSpans
from kvatlas.routing.compiler import GroupPair
from kvatlas.routing.request import BoundStates, RequestEnds
from tests.attack.by_tests import ROOT, PassingTests
from tests.attack.claims import Attack, Claim, Scene, repeated
from tests.attack.forged import forged_messages
from tests.attack.forks import forked_children
from tests.attack.hostile_readers import hostile_readers
from tests.attack.long_contexts import thin, wide
from tests.attack.opened_again import opened_again
from tests.attack.other_weights import other_weights
from tests.attack.plans import WIRES
from tests.attack.proxy import Proxy
from tests.attack.replaced_pushers import replaced_pushers
from tests.attack.same_blocks import owned_blocks, pulls_at_once, quarantined_blocks
from tests.attack.separate_peers import separate_peers
from tests.attack.soak import Soak
from tests.attack.stopped_readers import stopped_readers
from tests.attack.stops import stopped_sources
from tests.attack.suite import CLAIMS


def test_blocks_of_a_stopped_source_are_reused() -> None:
    outcome = stopped_sources(Attack(WIRES["shm"], tries=1, tokens=512, seed=1))
    assert (outcome.tries, outcome.held) == (1, 1), outcome.faults


def _hold(claim: Claim, tries: int) -> None:
    outcome = claim(Attack(WIRES["shm"], tries=tries, tokens=512, seed=1))
    assert (outcome.tries, outcome.held) == (tries, tries), outcome.faults


def test_ranks_with_other_weights_exchange_no_byte() -> None:
    _hold(other_weights, 7)


def test_a_request_that_is_ready_has_the_bytes_of_one_process_per_rank() -> None:
    _hold(replaced_pushers, 3)


def test_forked_children_keep_no_dead_peer_alive() -> None:
    _hold(forked_children, 2)


def test_an_announcement_takes_no_arrival_away() -> None:
    _hold(opened_again, 2)


@pytest.mark.parametrize("claim", [pulls_at_once, owned_blocks, quarantined_blocks])
def test_blocks_have_one_owner(claim: Claim) -> None:
    _hold(claim, 3)


def test_a_peer_beside_a_pull_sees_and_changes_nothing() -> None:
    _hold(separate_peers, 2)


def test_stopped_readers_hold_nobody_up() -> None:
    _hold(stopped_readers, 1)


def test_a_peer_reads_the_bytes_of_its_lease_alone() -> None:
    outcome = hostile_readers(Attack(WIRES["tcp"], tries=3, tokens=512, seed=1))
    assert (outcome.tries, outcome.held) == (3, 3), outcome.faults


def test_processes_that_a_library_ends_are_counted_apart() -> None:
    """What is left is tried again, and bytes that are wrong count all the same."""
    wire = replace(WIRES["shm"], aborts=("as UCX does",))
    results = iter([(["EOFError"], None), (["late bytes"], True), ([], True)])

    def strike(scene: Scene) -> tuple[list[str], bool | None]:
        faults, hit = next(results)
        if faults:
            assert scene.struck.process.pid is not None
            os.kill(scene.struck.process.pid, signal.SIGSEGV)
            scene.struck.process.join(10)
        return faults, hit

    outcome = repeated(Attack(wire, tries=2, tokens=128, seed=1), strike)
    assert (outcome.tries, outcome.held, outcome.aborts) == (2, 1, 2), outcome
    assert outcome.faults == {"late bytes": 1}


def test_forged_messages_change_nothing() -> None:
    outcome = forged_messages(Attack(WIRES["shm"], tries=1, tokens=128, seed=1))
    assert outcome.tries == outcome.held > 5, outcome.faults


def test_a_long_request_takes_little_memory_beside_its_pools() -> None:
    result = thin(1 << 17)
    assert result["held"], result
    for name in ("Gemma-3-27B", "Qwen3.5-397B-A17B", "DeepSeek-V4-Flash", "Mamba2-2.7B"):
        result = wide(name, 4_000, layers=3)
        assert result["held"], result


def test_descriptors_that_lead_elsewhere_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bytes are carried, each once and in bounds, and every block from another's place."""
    bind = RequestEnds.bind

    def turned(request: RequestEnds, pair: GroupPair, spans: StateSpans) -> BoundStates:
        bound = bind(request, pair, spans)
        return bound._replace(ids=(bound.ids[0][::-1], bound.ids[1]))

    monkeypatch.setattr(RequestEnds, "bind", turned)
    assert "where others belong" in wide("Phi-3-mini-4k", 500, layers=1)["wrong"]


def test_a_soak_notices_what_is_left_open(tmp_path: Path) -> None:
    """One descriptor and one segment are enough; what else a node opens, it closes."""
    soak = Soak(1, str(tmp_path), ["shm"], nodes=2)
    soak.tell(soak.workers[0], "leak", lambda _: None)
    soak.run(0.2, lambda _, __: None)
    assert not soak.surprises
    assert not soak.ok
    assert [one["node"] for one in soak.left_open] == [0]
    assert min(soak.left_open[0]["left"].values()) > 0


def test_tests_that_stand_for_claims_are_there() -> None:
    named = [test for row in CLAIMS.values() if isinstance(row.claim, PassingTests)
             for test in row.claim.tests]  # fmt: skip
    assert len(named) > 20
    for file, _, name in (test.partition("::") for test in named):
        assert f"def {name}(" in (ROOT / file).read_text() + "def ("


def test_a_proxy_that_leads_nowhere_closes_what_it_accepts() -> None:
    proxy = Proxy()
    host, _, port = proxy.endpoint.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as asked:
        assert asked.recv(1) == b""
    proxy.close()
