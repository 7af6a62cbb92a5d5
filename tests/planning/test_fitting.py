"""Models on GPUs: every topology is tried, and the best is taken."""

from __future__ import annotations

import itertools
import math
from functools import cache

import msgspec
import pytest

from kvatlas import AtlasError, Code
from kvatlas.models import Gpus, Model, Weights, find_gpu, find_gpus, memory_for_cache
from kvatlas.planning import Fitting, Topology, fit, plan
from kvatlas.planning.given_sizes import GivenSizes
from kvatlas.planning.topology import check_vllm_topology, stage_layers


def runs_in_vllm(name: str, tp: int, dcp: int) -> bool:
    try:
        check_vllm_topology(Model.load(name), tp, dcp)
    except AtlasError:
        return False
    return True


@cache
def loaded(name: str) -> tuple[Model, Weights]:
    return Model.load(name), Weights.load(name)


def planned_users(
    name: str, gpus: Gpus, sizes: dict[str, int], max_len: str
) -> tuple[int, int] | None:
    """Users of `plan()` with the memory that weights leave: decoding and prefilling, or None."""
    tp, pp, dp, dcp, ep = (sizes[size] for size in ("tp", "pp", "dp", "dcp", "ep"))
    try:
        model, weights = loaded(name)
        shares = stage_layers(model.depth, pp)
        held = weights.per_rank(tp=tp, ep=ep, stage_layers=shares)
        memory = memory_for_cache(gpus.gpu, held)
        made = plan(
            model, memory=memory, tp=tp, pp=pp, dcp=dcp, max_len=max_len, chip=CHIPS[gpus.gpu.name]
        )
    except AtlasError:
        return None
    return dp * int(made.requests(in_flight=1)), dp * int(made.requests())


CHIPS = {"H100": "sm90", "H200": "sm90", "L40S": None, "A100-80GB": "sm80", "B200": "sm100"}


@pytest.mark.parametrize(
    ("name", "machine", "max_len"),
    [
        ("Qwen3-8B", "H100", "16K"),
        ("Qwen3-8B", "4xA100", "32K"),
        ("gpt-oss-120b", "4xH100", "32K"),
        ("Qwen3-30B-A3B", "6xA100", "8K"),
        pytest.param("DeepSeek-V3.2", "8xH200", "32K", marks=pytest.mark.slow),
        pytest.param("Qwen3-235B-A22B", "8xH100", "32K", marks=pytest.mark.slow),
        ("Qwen3-Next-80B-A3B", "4xH100", "32K"),
        pytest.param("Kimi-Linear-48B-A3B", "4xH200", "16K", marks=pytest.mark.slow),
        pytest.param("Llama-3.1-70B", "2x4xH100", "32K", marks=pytest.mark.slow),
    ],
)
def test_no_plan_of_the_same_gpus_serves_more_users(name: str, machine: str, max_len: str) -> None:
    """Brute force: `plan()` in every topology of the GPUs that vLLM supports."""
    gpus = find_gpus(machine)
    found = fit(name, machine, max_len=max_len)
    assert found.topology.gpus == gpus.number
    every = dict[tuple[int, ...], int]()
    counts = range(1, gpus.number + 1)
    for tp, pp, dcp in itertools.product(counts, repeat=3):
        if gpus.number % (tp * pp) or tp % dcp or gpus.per_host % tp:
            continue
        if dcp > 1 and not runs_in_vllm(name, tp, dcp):
            continue
        dp = gpus.number // tp // pp
        for ep in range(1, tp * dp + 1):
            sizes = {"tp": tp, "pp": pp, "dp": dp, "dcp": dcp, "ep": ep}
            users = planned_users(name, gpus, sizes, max_len)
            if users is not None:
                every[tp, pp, dp, dcp, ep] = users[0]
                if Topology(**sizes) == found.topology:
                    assert users == (found.users(), found.users(decoding=False))
    assert found.users() == max(every.values())


def test_what_is_given_restricts_the_search() -> None:
    fitting = Fitting("DeepSeek-V3.2", find_gpu("H200"))
    gpus = find_gpus("8xH200")
    free = fitting.best(gpus)
    given = ({"tp": 4}, {"pp": 2}, {"dp": 2}, {"dcp": 2}, {"ep": 8}, {"tp": 4, "dcp": 4, "dp": 2})
    for sizes in given:
        found = fit("DeepSeek-V3.2", "8xH200", **sizes)
        assert found == fitting.best(gpus, GivenSizes(**sizes))
        assert all(getattr(found.topology, name) == n for name, n in sizes.items())
        assert found.topology.gpus == 8
        assert found.users() <= free.users()
        assert found.users() >= fitting.given(gpus, GivenSizes(**sizes)).users()


@pytest.mark.parametrize("machine", ["H100", "8xH100", "12xH100", "7xH100", "2x6xH100", "4x2xH100"])
@pytest.mark.parametrize(
    "sizes", [{}, {"tp": 2}, {"pp": 2}, {"dp": 3}, {"tp": 2, "dp": 2}, {"tp": 3, "pp": 2, "dp": 2}]
)
def test_every_factorisation_of_the_gpus_is_tried_once(machine: str, sizes: dict[str, int]) -> None:
    gpus = find_gpus(machine)
    number = math.prod(sizes.values()) if gpus.number == 1 else gpus.number
    expected = {
        (tp, pp, number // (tp * pp))
        for tp, pp in itertools.product(range(1, number + 1), repeat=2)
        if number % (tp * pp) == 0 and ("tp" in sizes or gpus.hosts == 1 or gpus.per_host % tp == 0)
    }
    given = [sizes.get(name) for name in ("tp", "pp", "dp")]
    expected = {
        found
        for found in expected
        if all(wanted in (None, size) for wanted, size in zip(given, found, strict=True))
    }
    listed = [(one.tp, one.pp, one.dp) for one in GivenSizes(**sizes).topologies(gpus)]
    assert set(listed) == expected
    assert len(listed) == len(expected)


def test_the_runner_up_is_second_and_has_a_reason() -> None:
    fitting = Fitting("DeepSeek-V3.2", find_gpu("H200"))
    gpus = find_gpus("8xH200")
    best = fitting.best(gpus)
    ranked = sorted(fitting.fits(gpus), key=lambda one: one.rank)
    second = best.runner_up
    assert second is not None
    others = [
        one for one in ranked if msgspec.structs.replace(one.topology, ep=1) != Topology(8, dcp=8)
    ]
    assert best.topology == ranked[0].topology == Topology(tp=8, dcp=8)
    assert (second.topology, second.users) == (others[0].topology, others[0].users())
    assert second.reason == "weights leave 325 GiB for caches on all GPUs, not 342 GiB"
    copies = ranked[0].reason_against(fitting.on(Topology(tp=8)))
    assert copies == "a request takes 19.1 GiB, not 2.39 GiB"
    equal = fit("Qwen3-8B", "8xH200").runner_up
    assert equal is not None
    assert equal.reason == "it serves no more users, with 2 pipeline stages instead of 1"
    assert fit("Qwen3-8B", "H200").runner_up is None


def test_the_best_of_several_cache_dtypes() -> None:
    plain, fp8, both = (
        fit("Qwen3-8B", "2xH100", kv_dtype=name) for name in (None, "fp8", "auto, fp8")
    )
    assert both.users() == fp8.users() > 1.9 * plain.users()
    assert (plain.kv_dtype, fp8.kv_dtype, both.kv_dtype) == ("auto", "fp8", "fp8")
    with pytest.raises(AtlasError) as refusal:
        fit("Qwen3-8B", "2xH100", kv_dtype="auto,fp7")
    assert refusal.value.code is Code.UNKNOWN_DTYPE


def test_experts_are_distributed_within_a_stage() -> None:
    """A stage holds its layers alone, so the ranks of other stages cannot hold their experts."""
    fitting = Fitting("DeepSeek-V3.2", find_gpu("H200"))
    refusal = fitting.on(Topology(tp=2, pp=2, dp=2, ep=8)).refusal
    assert refusal is not None
    assert refusal.code is Code.BAD_TOPOLOGY
    assert fitting.on(Topology(tp=2, pp=2, dp=2, ep=4)).plan is not None


def test_any_number_of_gpus_is_fitted() -> None:
    fitting = Fitting("Qwen3-8B", find_gpu("H200"))
    for gpus in (10**12, 999_999_999_989):  # the second is a prime
        found = fitting.best(Gpus(gpus, fitting.gpu, gpus))
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
        best = fitting.best(find_gpus(f"{gpus}xH200"))
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


def topology(machine: str, **sizes: int) -> Topology:
    return GivenSizes(**sizes).default(find_gpus(machine))


def test_topologies_that_contradict_are_refused() -> None:
    for sizes in ({"tp": 3}, {"tp": 8, "dp": 2}, {"dp": 3}):
        for derive in (topology, lambda machine, **given: fit("Qwen3-8B", machine, **given)):
            with pytest.raises(AtlasError) as refusal:
                derive("8xH100", **sizes)
            assert refusal.value.code is Code.CONTRADICTORY
    with pytest.raises(AtlasError) as refusal:
        topology("2xH100", ep=4)
    assert refusal.value.code is Code.BAD_TOPOLOGY
    assert topology("8xH100", pp=2) == Topology(tp=4, pp=2)
    assert topology("8xH100", tp=2) == Topology(tp=2, dp=4)
    assert topology("8xH100", tp=2, pp=2) == Topology(tp=2, pp=2, dp=2)
    assert topology("H100", tp=4, dp=2).gpus == 8
    assert fit("Qwen3-8B", "H100", tp=4, dp=2).topology == Topology(tp=4, dp=2)


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
                topology("8xH100", **{name: number})
            assert refusal.value.code is Code.BAD_SIZE


def test_a_loaded_model_has_no_weights() -> None:
    with pytest.raises(AtlasError) as refusal:
        fit(Model.load("Qwen3-8B"), "H100")
    assert refusal.value.code is Code.UNREADABLE


def test_the_ranks_of_a_stage_share_a_host() -> None:
    assert topology("2x8xH100") == Topology(tp=8, pp=2)
    assert topology("2x8xH100", dp=2) == Topology(tp=8, dp=2)
    assert topology("2x8xH100", tp=16) == Topology(tp=16), "as the user asks"
    small, large = fit("Qwen3-8B", "2x8xH100"), fit("Llama-3.1-405B", "2x8xH100")
    for found in (small, large):
        assert found.topology.gpus == 16
        assert found.topology.tp <= 8
    assert large.topology.pp >= 2, "one host has no space for the weights"
    assert small.users() >= 2 * fit("Qwen3-8B", "8xH100").users()


def test_experts_are_distributed_over_replicas_unless_ep_is_given() -> None:
    assert fit("Qwen3-235B-A22B", "8xH200", dp=2).topology.ep == 8
    assert fit("Qwen3-235B-A22B", "8xH200", dp=2, ep=1).topology.ep == 1
    assert fit("Qwen3-8B", "8xH200", dp=2).topology.ep == 1
