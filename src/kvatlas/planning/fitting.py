"""Fit a model on GPUs: find the topology that serves the most users.

`fit()` takes a model and GPUs, such as `8xH100`. A topology distributes the model over all of
them: `dp` replicas, each with `pp` pipeline stages of `tp` ranks. The weights are placed
first; caches get the rest of the memory. Pipelines are tried only if nothing fits without
them. A mixture-of-experts model can also distribute its experts over the ranks of all replicas
(`ep`), as engines do when attention is replicated. If ranks hold copies of the cache, decode
context parallelism (`dcp`) is tried too, with the largest size that vLLM supports.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import positive
from kvatlas.models import OVERHEAD, Gpu, Gpus, Model, find_gpus, memory_for_cache
from kvatlas.planning.engine_rules import chip_of
from kvatlas.planning.plan_data import DECODING
from kvatlas.planning.planner import plan
from kvatlas.planning.plans import Plan
from kvatlas.planning.request import quantity
from kvatlas.planning.sized_layers import FIXED_KINDS, kind_of
from kvatlas.planning.topology import (
    MOST_RANKS,
    check_topology,
    check_vllm_topology,
    stage_layers,
)


class Topology(msgspec.Struct, frozen=True, order=True):
    """The distribution of a model over GPUs.

    The fields are the sizes of tensor (tp), pipeline (pp), data (dp), decode context (dcp) and
    expert parallelism (ep).

    >>> print(Topology(tp=4, dp=2), Topology(tp=4, dp=2).gpus)
    tp 4, dp 2 8
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    dcp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name, number in msgspec.structs.asdict(self).items():
            positive(number, name)

    @property
    def gpus(self) -> int:
        """The number of GPUs: tp x pp x dp. dcp and ep reuse these GPUs."""
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        sizes = msgspec.structs.asdict(self)
        return ", ".join(f"{name} {n}" for name, n in sizes.items() if n > 1 or name == "tp")


class Fit(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A model on GPUs in one topology: its weights per rank, and the plan of its caches."""

    model: str
    gpu: str
    topology: Topology
    weights: int = 0
    """Bytes of weights on the rank that holds the most."""
    weights_source: str = ""
    """How `weights` was determined, as in `Weights.source`."""
    weights_estimate: bool = False
    """Whether `weights` is an estimate, as in `Weights.estimate`."""
    weights_warnings: tuple[str, ...] = ()
    """Assumptions about the weights, as in `Weights.warnings`."""
    overhead: int = OVERHEAD
    utilization: float = 0.9
    plan: Plan | None = None
    refusal: AtlasError | None = None
    """The error, if there is no plan."""

    def users(self, length: int | None = None, *, decoding: bool = True) -> int:
        """Return how many requests of `length` tokens all replicas together serve at once.

        `length` defaults to the plan's `max_len`. If `decoding` is true, all requests decode. If it
        is false, all requests prefill, which takes more blocks.
        """
        if self.plan is None:
            return 0
        each = self.plan.requests(length, in_flight=DECODING if decoding else None)
        return int(each) * self.topology.dp

    @cached_property
    def rank(self) -> tuple[Any, ...]:
        """Sort key of fits; the fit with the smallest key is the best.

        Fits with a plan come first. Fewer pipeline stages are better, then more users, then
        fewer replicas, then a smaller dcp. Among fits without a plan, fewer weight bytes per rank
        are better, so that the error of the closest attempt is reported. Invalid topologies, for
        which no weights were computed, come last.
        """
        if self.plan is None:
            return (True, not self.weights, self.weights)
        return (False, self.topology.pp, -self.users(), self.topology.dp, self.topology.dcp)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings about the weights, then those of the plan."""
        notes = (f"weights: {warning}" for warning in self.weights_warnings)
        return (*notes, *(self.plan.warnings if self.plan else ()))

    def as_dict(self) -> dict[str, Any]:
        """Return the fit as a JSON object."""
        refused = self.refusal and {"code": str(self.refusal.code), "message": str(self.refusal)}
        return {
            "model": self.model,
            "gpu": self.gpu,
            "gpus": self.topology.gpus,
            **msgspec.structs.asdict(self.topology),
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
        }


class Fitting:
    """Fits one model on GPUs of one kind, in any topology.

    `weights_dtype` is the format of the weights, by default that of the checkpoint. `options` are
    passed to `plan()` and must not include the memory or the topology.
    """

    def __init__(
        self,
        model: Any,
        gpu: Gpu,
        *,
        utilization: float = 0.9,
        overhead: int | str = OVERHEAD,
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
        self.overhead = quantity(overhead, "the overhead")
        if options.get("chip") is None:
            options["chip"] = chip_of(gpu.name)

    def on(self, topology: Topology) -> Fit:
        """Return the fit in one topology, with the error as `refusal` if the model does not fit."""
        held = 0
        try:
            check_topology(self.model, topology.tp, topology.pp, topology.dcp)
            stages = stage_layers(self.model.depth, topology.pp)
            held = self.weights.per_rank(tp=topology.tp, ep=topology.ep, stage_layers=stages)
            memory = memory_for_cache(
                self.gpu,
                held,
                utilization=self.utilization,
                overhead=self.overhead,
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
            return self._fit(topology, held, refusal=refusal)
        return self._fit(topology, held, made=made)

    def given(
        self,
        gpus: Gpus,
        *,
        tp: int | None = None,
        pp: int | None = None,
        dp: int | None = None,
        dcp: int = 1,
        ep: int | None = None,
    ) -> Fit:
        """Return the fit in the topology that `given_topology` derives from the given sizes.

        `ep` defaults to all GPUs if a mixture-of-experts model has replicas, and else to 1.
        """
        topology = given_topology(
            gpus.number, per_host=gpus.per_host, tp=tp, pp=pp, dp=dp, dcp=dcp, ep=ep or 1
        )
        if ep is None and self._deals_experts(topology):
            topology = msgspec.structs.replace(topology, ep=topology.gpus)
        return self.on(topology)

    def best(self, gpus: int, *, per_host: int | None = None) -> Fit:
        """Return the fit on `gpus` GPUs that serves the most users.

        With `per_host`, each host has `per_host` GPUs, and the ranks of a pipeline stage share a
        host.
        """
        found, gpus = list[Fit](), positive(gpus, "the number of GPUs")
        most = min(MOST_RANKS, gpus if per_host is None else positive(per_host, "per_host"))
        for pp in (n for n in range(1, min(gpus, MOST_RANKS) + 1) if gpus % n == 0):
            for topology in self._topologies(gpus // pp, pp, most):
                found += [self.on(topology), *self._with_dcp(topology)]
            if any(fit.plan for fit in found):
                break
        return min(found, key=lambda fit: fit.rank)

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

    def _topologies(self, gpus: int, pp: int, most: int) -> Iterator[Topology]:
        """Yield the topologies of `gpus` GPUs per stage, with a tp of at most `most`."""
        for tp in (n for n in range(min(gpus, most), 0, -1) if gpus % n == 0):
            topology = Topology(tp=tp, pp=pp, dp=gpus // tp)
            deal = self._deals_experts(topology)
            yield msgspec.structs.replace(topology, ep=gpus) if deal else topology

    def _deals_experts(self, topology: Topology) -> bool:
        """Return whether to distribute the experts over all replicas.

        Distributed experts never take more memory than replicated ones.
        """
        return topology.dp > 1 and topology.pp == 1 and self._has_experts

    def _with_dcp(self, topology: Topology) -> Iterator[Fit]:
        """Yield the fit with the largest dcp that vLLM supports, if ranks replicate the cache."""
        copies = self._copies(topology.tp)
        for dcp in sorted((n for n in range(2, copies + 1) if topology.tp % n == 0), reverse=True):
            if not self._vllm_takes(topology.tp, dcp):
                continue
            fit = self.on(msgspec.structs.replace(topology, dcp=dcp))
            if fit.plan is not None:
                yield fit
                break

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
        *,
        made: Plan | None = None,
        refusal: AtlasError | None = None,
    ) -> Fit:
        return Fit(
            model=self.model.name,
            gpu=self.gpu.name,
            topology=topology,
            weights=weights,
            weights_source=self.weights.source,
            weights_estimate=self.weights.estimate,
            weights_warnings=self.weights.warnings,
            overhead=self.overhead,
            utilization=self.utilization,
            plan=made,
            refusal=refusal,
        )


def fit(
    model: Any,
    gpus: str,
    *,
    tp: int | None = None,
    pp: int | None = None,
    dp: int | None = None,
    dcp: int = 1,
    ep: int | None = None,
    **options: Any,
) -> Fit:
    """Fit a model on GPUs such as `8xH100`.

    The topology is given by `tp`, `pp`, `dp`, `dcp` and `ep`; see `Topology`. If all of them have
    their defaults, `fit` searches for the topology that serves the most users. If some are given,
    the remaining GPUs go to `tp`, or to `dp` if `tp` is given. `2x8xH100` names two hosts; the
    ranks of a pipeline stage then share a host. `model` is anything that `Weights.load` takes; a
    `Model` is not enough, because it has no weights. Options are `utilization`, the fraction of GPU
    memory to use (0.9 by default), `overhead`, the bytes per GPU for everything except weights and
    cache, `weights_dtype`, the format of the weights if it is not that of the checkpoint, and the
    options of `plan()`.

    >>> found = fit("Llama-3.1-8B", "2xH100", max_len="32K")
    >>> print(found.topology, found.users())
    tp 2 30
    """
    machine = find_gpus(gpus)
    fitting = Fitting(model, machine.gpu, **options)
    if tp is pp is dp is ep is None and dcp == 1:
        return fitting.best(machine.number, per_host=machine.per_host)
    return fitting.given(machine, tp=tp, pp=pp, dp=dp, dcp=dcp, ep=ep)


def given_topology(
    gpus: int,
    *,
    per_host: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    dp: int | None = None,
    dcp: int = 1,
    ep: int = 1,
) -> Topology:
    """Return the topology of `gpus` GPUs that the given sizes determine.

    `tp` defaults to gpus / (pp x dp), and `dp` to gpus / (tp x pp) if `tp` is given. With several
    hosts of `per_host` GPUs, `tp` defaults to at most `per_host`. If no size is given, each host is
    a pipeline stage; otherwise `dp` takes the GPUs that are left. If `gpus` is 1, the user named a
    GPU without a number, so any number of GPUs is allowed.

    >>> print(given_topology(8, dp=2), "/", given_topology(8, tp=2), "/", given_topology(1, tp=4))
    tp 4, dp 2 / tp 2, dp 4 / tp 4
    >>> print(given_topology(16, per_host=8))
    tp 8, pp 2
    """
    host = gpus if per_host is None else per_host
    if tp is pp is dp is None and host < gpus:
        pp = gpus // host
    stages = 1 if pp is None else positive(pp, "pp")
    left = max(1, gpus // (stages * (1 if dp is None else positive(dp, "dp"))))
    ranks = min(left, host) if tp is None else positive(tp, "tp")
    replicas = max(1, gpus // (stages * ranks)) if dp is None else dp
    topology = Topology(tp=ranks, pp=stages, dp=replicas, dcp=dcp, ep=ep)
    if gpus > 1 and topology.gpus != gpus:
        raise AtlasError(
            Code.CONTRADICTORY,
            f"tp x pp x dp must be the number of GPUs, {gpus}",
            got=f"{topology}, a product of {topology.gpus}",
            hint="Change or omit tp, pp or dp, or name the GPU without a number",
        )
    if topology.ep > topology.gpus:
        raise AtlasError(
            Code.BAD_TOPOLOGY,
            "`ep` must not exceed the number of GPUs",
            got=f"ep {ep} with {topology.gpus} GPUs",
            hint=f"Use an ep of at most {topology.gpus}",
        )
    return topology
