"""Fit a model on GPUs: find the topology that serves the most users.

`fit()` takes a model and GPUs, such as `8xH100`. A topology distributes the model over all of these
GPUs: `dp` replicas, each with `pp` pipeline stages of `tp` ranks. The weights are placed
first; caches get the rest of the memory. A mixture-of-experts model can also distribute its experts
over the ranks of all replicas (`ep`), as engines do when attention is replicated. If ranks hold
copies of the same cache, decode context parallelism (`dcp`) divides the cache among these ranks.
The search tries every choice of the sizes that the user leaves open, and every cache dtype that the
user lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import islice
from typing import Any

import msgspec
from msgspec.structs import replace

from kvatlas.errors import AtlasError
from kvatlas.geometry.byte_sizes import size
from kvatlas.geometry.integers import positive
from kvatlas.models import OVERHEAD, Gpu, Gpus, Model, find_gpus, memory_for_cache
from kvatlas.planning.engine_rules import chip_of
from kvatlas.planning.given_sizes import GivenSizes, Topology, check_experts, sizes_of
from kvatlas.planning.memory_budget import Budget, EngineLoad, gpu_budget
from kvatlas.planning.plan_data import DECODING
from kvatlas.planning.planner import plan
from kvatlas.planning.plans import Plan
from kvatlas.planning.request import quantity
from kvatlas.planning.sized_layers import FIXED_KINDS, kind_of
from kvatlas.planning.topology import check_topology, check_vllm_topology, stage_layers

ANY = GivenSizes()
"""No size is given, so the search is over all topologies."""


_ALIKE = 1.005
"""Sizes whose ratio is below this are alike, so they do not explain a difference."""


_PREFERENCES = {
    "pp": "pipeline stages",
    "dp": "replicas",
    "dcp": "decode-context-parallel ranks",
    "ep": "expert-parallel ranks",
}
"""Sizes of a topology that decide between equal numbers of users: smaller is better."""


class RunnerUp(msgspec.Struct, frozen=True, kw_only=True):
    """The second best fit of a search, and the reason why it is not the best."""

    topology: Topology
    kv_dtype: str
    users: int
    """Requests of `max_len` tokens that decode at once on all replicas together."""
    reason: str


class Fit(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A model on GPUs in one topology: its weights per rank, and the plan of its caches."""

    model: str
    gpu: str
    topology: Topology
    kv_dtype: str = "auto"
    """The dtype of the cache; `auto` is that of the checkpoint."""
    weights: int = 0
    """Bytes of weights on the rank that holds the most."""
    weights_source: str = ""
    """How `weights` was determined, as in `Weights.source`."""
    weights_estimate: bool = False
    """Whether `weights` is an estimate, as in `Weights.estimate`."""
    weights_warnings: tuple[str, ...] = ()
    """Assumptions about the weights, as in `Weights.warnings`."""
    chip: str | None = None
    """The chip whose rules the plan has; None if no rules for the GPU are known."""
    overhead: int = OVERHEAD
    utilization: float = 0.9
    plan: Plan | None = None
    refusal: AtlasError | None = None
    """The error, if there is no plan."""
    runner_up: RunnerUp | None = None
    """The second best fit of the search that found this fit, if there is one."""

    def users(self, length: int | None = None, *, decoding: bool = True) -> int:
        """Return how many requests of `length` tokens all replicas together serve at once.

        `length` defaults to the plan's `max_len`. If `decoding` is true, all requests decode.
        Otherwise all requests prefill, which takes more blocks.
        """
        if self.plan is None:
            return 0
        each = self.plan.requests(length, in_flight=DECODING if decoding else None)
        return int(each) * self.topology.dp

    @cached_property
    def rank(self) -> tuple[Any, ...]:
        """Sort key of fits; the fit with the smallest key is the best.

        Fits with a plan come first. More users are better, then fewer pipeline stages, fewer
        replicas and a smaller dcp and ep. Among fits without a plan, fewer weight bytes per rank
        are better, so that the error of the closest attempt is reported. Invalid topologies, for
        which no weights were computed, come last.
        """
        if self.plan is None:
            return (True, not self.weights, self.weights, self.topology.pp)
        preferred = (getattr(self.topology, name) for name in _PREFERENCES)
        return (False, -self.users(), *preferred)

    @property
    def cache(self) -> int:
        """Bytes for caches on all GPUs together."""
        return self.plan.memory * self.topology.gpus if self.plan else 0

    @property
    def request(self) -> int:
        """Bytes that a decoding request of `max_len` tokens takes on all its ranks together."""
        if self.plan is None:
            return 0
        each = self.cache / self.topology.dp
        return round(each / self.plan.requests(in_flight=DECODING))

    def differs_in_experts(self, other: Fit) -> bool:
        """Return whether the fits differ in nothing but `ep`."""
        alike = replace(self.topology, ep=other.topology.ep) == other.topology
        return alike and self.kv_dtype == other.kv_dtype

    def reason_against(self, other: Fit) -> str:
        """Return why this fit is preferred to `other`, which serves at most as many users."""
        if self.users() == other.users():
            for name, what in _PREFERENCES.items():
                mine, others = getattr(self.topology, name), getattr(other.topology, name)
                if others > mine:
                    return f"it serves no more users, with {others} {what} instead of {mine}"
            return "it serves no more users"
        reasons = []
        if other.request > self.request * _ALIKE:
            reasons.append(f"a request takes {size(other.request)}, not {size(self.request)}")
        if other.cache * _ALIKE < self.cache:
            left = f"{size(other.cache)} for caches on all GPUs, not {size(self.cache)}"
            reasons.append(f"weights leave {left}")
        return " and ".join(reasons) or "each replica leaves a part of a request unused"

    @property
    def machine_warnings(self) -> tuple[str, ...]:
        """The warnings about the weights and about the chip."""
        notes = [f"weights: {warning}" for warning in self.weights_warnings]
        if self.plan and self.chip is None and self.plan.policy.startswith("vllm"):
            notes.append(
                f"the rules of vLLM for {self.gpu} are not known: the plan has the rules that hold "
                "on every CUDA chip, and the backends of Hopper. Pass chip= to select a chip."
            )
        return tuple(notes)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings about the weights and the chip, then the warnings of the plan."""
        return (*self.machine_warnings, *(self.plan.warnings if self.plan else ()))

    def as_dict(self) -> dict[str, Any]:
        """Return the fit as a JSON object."""
        refused = self.refusal and {"code": str(self.refusal.code), "message": str(self.refusal)}
        second = self.runner_up
        runner_up = second and {
            **msgspec.structs.asdict(second.topology),
            "kv_dtype": second.kv_dtype,
            "users_decoding": second.users,
            "reason": second.reason,
        }
        return {
            "model": self.model,
            "gpu": self.gpu,
            "gpus": self.topology.gpus,
            **msgspec.structs.asdict(self.topology),
            "kv_dtype": self.kv_dtype,
            "weights_per_rank": self.weights,
            "weights_source": self.weights_source,
            "weights_estimate": self.weights_estimate,
            "overhead": self.overhead,
            "utilization": self.utilization,
            "memory": self.plan.memory if self.plan else 0,
            "max_len": self.plan.max_len if self.plan else None,
            "in_flight": self.plan.in_flight if self.plan else None,
            "users_prefilling": self.users(decoding=False),
            "users_decoding": self.users(),
            "warnings": list(self.warnings),
            "refused": refused,
            "runner_up": runner_up,
        }


class Fitting:
    """Fits one model on GPUs of one kind, in any topology.

    `overhead` is the bytes per GPU for everything except weights and cache. Instead of bytes,
    `overhead` may be the engine's settings (`EngineLoad`), from which `gpu_budget` predicts the
    bytes, or `"auto"` for the default settings.
    `weights_dtype` is the format of the weights, by default the checkpoint's. `options` are
    passed to `plan()` and must not include the memory or the topology.
    """

    def __init__(
        self,
        model: Any,
        gpu: Gpu,
        *,
        utilization: float = 0.9,
        overhead: int | str | EngineLoad = OVERHEAD,
        weights_dtype: str | None = None,
        **options: Any,
    ) -> None:
        from kvatlas.models import Weights  # slow to import, and plans do not need it

        self.weights = Weights.load(model, dtype=weights_dtype)
        kv_dtype = options.pop("kv_dtype", None)
        self.model = Model.load(model)
        if kv_dtype is not None:
            self.model = self.model.with_cache(kv_dtype)
        self.gpu, self.utilization, self.options = gpu, utilization, options
        self.load: EngineLoad | None = None
        if overhead == "auto":
            overhead = EngineLoad.default(gpu)
        if isinstance(overhead, EngineLoad):
            self.load, self.overhead = overhead, 0
        else:
            self.overhead = quantity(overhead, "the overhead")
        if options.get("chip") is None:
            options["chip"] = chip_of(gpu.name)

    def on(self, topology: Topology) -> Fit:
        """Return the fit in one topology, with the error as `refusal` if the model does not fit."""
        held, overhead = 0, self.overhead
        try:
            check_experts(topology)
            check_topology(self.model, topology.tp, topology.pp, topology.dcp)
            stages = stage_layers(self.model.depth, topology.pp)
            held = self.weights.per_rank(tp=topology.tp, ep=topology.ep, stage_layers=stages)
            if self.load is not None:
                budget = self.budget(topology)
                overhead = budget.usable - budget.kv - held
            memory = memory_for_cache(
                self.gpu,
                held,
                utilization=self.utilization,
                overhead=overhead,
                weights_source=self._weights_origin,
            )
            made = plan(
                self.model,
                memory=memory,
                tp=topology.tp,
                pp=topology.pp,
                dcp=topology.dcp,
                **self.options,
            )
        except AtlasError as refusal:
            return self._fit(topology, held, overhead, refusal=refusal)
        return self._fit(topology, held, overhead, made=made)

    def budget(self, topology: Topology) -> Budget:
        """Return the memory budget of a GPU in one topology."""
        return gpu_budget(
            self.weights, self.gpu, topology, load=self.load, utilization=self.utilization
        )

    def given(self, gpus: Gpus, sizes: GivenSizes = ANY) -> Fit:
        """Return the fit in the topology that `sizes.default` derives from the given sizes.

        `ep` defaults to tp x dp for a mixture-of-experts model with replicas, otherwise to 1.
        """
        topology = sizes.default(gpus)
        if sizes.ep is None and topology.dp > 1 and self._has_experts:
            topology = replace(topology, ep=topology.stage_gpus)
        return self.on(topology)

    def best(self, gpus: Gpus, sizes: GivenSizes = ANY) -> Fit:
        """Return the fit that serves the most users, of all topologies that have these sizes.

        Its `runner_up` is the second best fit. With several hosts, the ranks of a pipeline stage
        share a host.
        """
        return best_of(self.fits(gpus, sizes))

    def fits(self, gpus: Gpus, sizes: GivenSizes = ANY) -> Iterator[Fit]:
        """Yield the fits in all topologies with the given sizes, in no particular order.

        If `dcp` is not given, only values that vLLM supports are tried. If `ep` is not given, it
        is tp x dp or 1, whichever takes less memory.
        """
        positive(gpus.number, "the number of GPUs")
        found = False
        for topology in sizes.topologies(gpus):
            found = True
            for placed in [topology] if sizes.ep else self._with_experts(topology):
                yield self.on(placed)
                if sizes.dcp is None:
                    dcps = self._dcps(topology.tp)
                    yield from (self.on(replace(placed, dcp=dcp)) for dcp in dcps)
        if not found:
            yield self.on(sizes.default(gpus))

    def suggestions(self, topology: Topology) -> Iterator[Fit]:
        """Yield fits in topologies that replicate the cache on fewer ranks than `topology` does.

        Yields nothing if `topology` does not replicate the cache.
        """
        yield from self._with_dcp(topology)
        copies = self._copies(topology.tp)
        if copies > 1 and topology.pp == 1:
            dp = topology.dp * copies
            ep = topology.gpus if self._has_experts else 1
            fit = self.on(Topology(tp=topology.tp // copies, dp=dp, ep=ep))
            if fit.plan is not None:
                yield fit

    def _with_experts(self, topology: Topology) -> list[Topology]:
        """Return the topology twice, with and without distributed experts.

        If a rank holds clearly fewer bytes in one of the two, only that one is returned.
        """
        spread = replace(topology, ep=topology.stage_gpus)
        if not self._has_experts or spread == topology or topology.pp > self.model.depth:
            return [topology]
        stages = stage_layers(self.model.depth, topology.pp)
        held = {
            one: self.weights.per_rank(tp=one.tp, ep=one.ep, stage_layers=stages)
            for one in (topology, spread)
        }
        return [one for one in held if held[one] <= min(held.values()) * _ALIKE]

    def _dcps(self, tp: int) -> Iterator[int]:
        """Yield each dcp above 1 that vLLM supports, from the largest down.

        Yields nothing if no two ranks hold copies of the same cache.
        """
        copies = self._copies(tp)
        yield from (n for n in range(copies, 1, -1) if tp % n == 0 and self._vllm_takes(tp, n))

    def _with_dcp(self, topology: Topology) -> Iterator[Fit]:
        """Yield the fit with the largest dcp for which there is a plan, or nothing.

        Only values of dcp above 1 that vLLM supports are tried. There are none if ranks do not
        replicate the cache.
        """
        fits = (self.on(replace(topology, dcp=dcp)) for dcp in self._dcps(topology.tp))
        yield from islice((fit for fit in fits if fit.plan is not None), 1)

    def _copies(self, tp: int) -> int:
        """Return how many of `tp` ranks hold the cache of the same KV heads."""
        kept = [layer.spec for layer in self.model.layers if kind_of(layer.spec) not in FIXED_KINDS]
        heads = max((getattr(spec, "heads", 1) for spec in kept), default=tp)
        return tp // heads if tp % heads == 0 else 1

    @property
    def _weights_origin(self) -> str:
        """Origin of the size of the weights; for an estimate, also its assumptions."""
        source = self.weights.source
        return "; ".join((source, *self.weights.warnings)) if self.weights.estimate else source

    @property
    def _has_experts(self) -> bool:
        return "experts" in self.weights.classes

    def _vllm_takes(self, tp: int, dcp: int) -> bool:
        try:
            check_vllm_topology(self.model, tp, dcp)
        except AtlasError:
            return False
        return True

    def _fit(
        self,
        topology: Topology,
        weights: int,
        overhead: int,
        *,
        made: Plan | None = None,
        refusal: AtlasError | None = None,
    ) -> Fit:
        return Fit(
            model=self.model.name,
            gpu=self.gpu.name,
            topology=topology,
            kv_dtype=self.model.cache,
            weights=weights,
            weights_source=self.weights.source,
            weights_estimate=self.weights.estimate,
            weights_warnings=self.weights.warnings,
            chip=self.options["chip"],
            overhead=overhead,
            utilization=self.utilization,
            plan=made,
            refusal=refusal,
        )


def best_of(fits: Iterable[Fit]) -> Fit:
    """Return the best fit, with the second best as its `runner_up`.

    If two fits are equally good, the earlier one in `fits` is preferred. A fit that differs from
    the best one only in `ep` does not count as second best.
    """
    best, *others = sorted(fits, key=lambda fit: fit.rank)
    second = next((fit for fit in others if fit.plan and not fit.differs_in_experts(best)), None)
    if second is None:
        return best
    runner_up = RunnerUp(
        topology=second.topology,
        kv_dtype=second.kv_dtype,
        users=second.users(),
        reason=best.reason_against(second),
    )
    return replace(best, runner_up=runner_up)


def fit(model: Any, gpus: str, **options: Any) -> Fit:
    """Fit a model on GPUs such as `8xH100`: find the topology that serves the most users.

    Each of the options `tp`, `pp`, `dp`, `dcp` and `ep` restricts the search to topologies of this
    size; see `Topology`. `kv_dtype` is the dtype of the cache, or a list of dtypes such as
    `auto,fp8`, of which the search uses the best. By default, the checkpoint determines the dtype.
    `2x8xH100` names two hosts; the ranks of a pipeline stage then share a host.

    `model` is anything that `Weights.load` takes; a `Model` is not enough, because it has no
    weights. Other options are `utilization`, the fraction of GPU memory to use (0.9 by default),
    `overhead`, the bytes per GPU for everything except weights and cache (or `"auto"` for the
    prediction of `gpu_budget`), `weights_dtype`, the format of the weights if it is not that of the
    checkpoint, and the options of `plan()`.

    >>> found = fit("Llama-3.1-8B", "2xH100", max_len="32K")
    >>> print(found.topology, found.users())
    tp 2 30
    >>> fit("Llama-3.1-8B", "2xH100", max_len="32K", kv_dtype="auto,fp8", dp=2).users()
    52
    """
    machine, sizes = find_gpus(gpus), sizes_of(options)
    listed = options.pop("kv_dtype", None)
    names = [None] if listed is None else [name.strip() for name in str(listed).split(",")]
    fits: list[Fit] = []
    for name in dict.fromkeys(names):
        fitting = Fitting(model, machine.gpu, kv_dtype=name, **options)
        fits += fitting.fits(machine, sizes)
    return best_of(fits)
