"""Models on GPUs: every topology is tried, and the best is taken."""

from __future__ import annotations

import pytest

from kvatlas import AtlasError, Code
from kvatlas.models import Model, find_gpu
from kvatlas.planning import Fitting, Topology, fit
from kvatlas.planning.fitting import given_topology
from kvatlas.planning.topology import check_vllm_topology


def runs_in_vllm(name: str, tp: int, dcp: int) -> bool:
    try:
        check_vllm_topology(Model.load(name), tp, dcp)
    except AtlasError:
        return False
    return True


@pytest.mark.parametrize(
    "name", ["Qwen3-8B", "gpt-oss-120b", "DeepSeek-V3.2", "Kimi-Linear-48B-A3B"]
)
@pytest.mark.parametrize("gpus", [1, 4, 8])
def test_no_topology_serves_more_users(name: str, gpus: int) -> None:
    found = fit(name, f"{gpus}xH200", max_len="16K")
    fitting = Fitting(name, find_gpu("H200"), max_len="16K")
    every = [
        fitting.on(Topology(tp=tp, pp=pp, dp=gpus // tp // pp, dcp=dcp))
        for tp in (1, 2, 4, 8)
        for pp in (1, 2, 4, 8)
        for dcp in (1, 2, 4, 8)
        if gpus % (tp * pp) == 0 and tp % dcp == 0 and runs_in_vllm(name, tp, dcp)
    ]
    alike = [one for one in every if one.plan and one.topology.pp == found.topology.pp]
    if found.plan is None:
        assert not any(one.plan for one in every)
        return
    assert found.users() >= max(one.users() for one in alike)
    assert all(one.topology.pp >= found.topology.pp for one in every if one.plan)
    assert found.topology.gpus == gpus


def test_any_number_of_gpus_is_fitted() -> None:
    fitting = Fitting("Qwen3-8B", find_gpu("H200"))
    for gpus in (10**12, 999_999_999_989):  # the second is a prime
        found = fitting.best(gpus)
        assert found.plan is not None
        assert found.topology.gpus == gpus


def test_weights_and_caches_fit_the_gpu() -> None:
    for name, gpus in (("Llama-3.1-70B", "4xH100"), ("DeepSeek-V3.2", "8xH200")):
        found = fit(name, gpus)
        assert found.plan is not None
        gpu = find_gpu(found.gpu)
        taken = max(
            sum(pool.nbytes for pool in found.plan.pools if pool.stage == stage)
            for stage in range(found.topology.pp)
        )
        assert taken + found.weights + found.overhead <= gpu.memory * found.utilization


def test_experts_over_all_replicas_let_attention_be_replicated() -> None:
    fitting = Fitting("DeepSeek-V3.2", find_gpu("H200"))
    alone = fitting.on(Topology(tp=1, dp=8))
    assert alone.refusal is not None
    assert alone.refusal.code is Code.WEIGHTS_TOO_LARGE
    assert fitting.on(Topology(tp=1, dp=8, ep=8)).users() > fitting.on(Topology(tp=8)).users()


def test_the_best_fit_is_not_below_a_suggestion() -> None:
    for name, gpus in (("DeepSeek-V3.2", 8), ("Qwen3-32B", 16), ("Qwen3.5-397B-A17B", 8)):
        fitting = Fitting(name, find_gpu("H200"))
        best = fitting.best(gpus)
        offered = [one.users() for one in fitting.suggestions(Topology(tp=gpus))]
        assert offered
        assert best.users() >= max(offered)
        assert best.topology.gpus == gpus


def test_suggestions_are_for_those_who_hold_copies() -> None:
    latent = Fitting("DeepSeek-V3", find_gpu("H200"))
    assert next(one.topology.dcp for one in latent.suggestions(Topology(tp=8))) == 8
    few = Fitting("Qwen3.5-397B-A17B", find_gpu("B200"))  # two kv heads
    assert all(one.users() for one in few.suggestions(Topology(tp=8)))
    many = Fitting("Qwen3-8B", find_gpu("H100"))
    assert not list(many.suggestions(Topology(tp=8)))


def test_topologies_that_contradict_are_refused() -> None:
    for sizes in ({"tp": 3}, {"tp": 8, "dp": 2}, {"dp": 3}):
        with pytest.raises(AtlasError) as refusal:
            given_topology(8, **sizes)
        assert refusal.value.code is Code.CONTRADICTORY
    with pytest.raises(AtlasError) as refusal:
        given_topology(2, ep=4)
    assert refusal.value.code is Code.BAD_TOPOLOGY
    assert given_topology(8, pp=2) == Topology(tp=4, pp=2)
    assert given_topology(8, tp=2) == Topology(tp=2, dp=4)
    assert given_topology(8, tp=2, pp=2) == Topology(tp=2, pp=2, dp=2)
    assert given_topology(1, tp=4, dp=2).gpus == 8


def test_what_does_not_fit_is_told_of_a_topology_that_could_be() -> None:
    """Not that three ranks do not divide 64 heads, where the weights are too large for all."""
    found = fit("Llama-3.1-70B", "3xL4")
    assert found.refusal is not None
    assert found.refusal.code is Code.WEIGHTS_TOO_LARGE
    assert found.topology.gpus == 3


def test_sizes_below_one_are_no_topology() -> None:
    for name in ("tp", "pp", "dp", "dcp", "ep"):
        for number in (0, -1):
            with pytest.raises(AtlasError) as refusal:
                given_topology(8, **{name: number})
            assert refusal.value.code is Code.BAD_SIZE


def test_a_loaded_model_has_no_weights() -> None:
    with pytest.raises(AtlasError) as refusal:
        fit(Model.load("Qwen3-8B"), "H100")
    assert refusal.value.code is Code.UNREADABLE


def test_the_ranks_of_a_stage_share_a_host() -> None:
    assert given_topology(16, per_host=8) == Topology(tp=8, pp=2)
    assert given_topology(16, per_host=8, dp=2) == Topology(tp=8, dp=2)
    assert given_topology(16, per_host=8, tp=16) == Topology(tp=16), "as the user asks"
    small, large = fit("Qwen3-8B", "2x8xH100"), fit("Llama-3.1-405B", "2x8xH100")
    for found in (small, large):
        assert found.topology.gpus == 16
        assert found.topology.tp <= 8
    assert large.topology.pp == 2, "one host has no space for the weights"
    assert small.users() >= 2 * fit("Qwen3-8B", "8xH100").users()


def test_experts_are_distributed_over_replicas_unless_ep_is_given() -> None:
    assert fit("Qwen3-235B-A22B", "8xH200", dp=2).topology.ep == 8
    assert fit("Qwen3-235B-A22B", "8xH200", dp=2, ep=1).topology.ep == 1
    assert fit("Qwen3-8B", "8xH200", dp=2).topology.ep == 1
