"""Topologies: `Topology`, and `GivenSizes`, the sizes of a topology that a user gives.

Sizes that the user omits are open. `GivenSizes.default` derives them from the GPUs, and
`GivenSizes.topologies` lists every choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import positive
from kvatlas.models import Gpus
from kvatlas.planning.topology import MOST_RANKS


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

    @property
    def stage_gpus(self) -> int:
        """The number of GPUs that hold one pipeline stage: tp x dp. This is the maximum of ep."""
        return self.tp * self.dp

    def __str__(self) -> str:
        sizes = msgspec.structs.asdict(self)
        return ", ".join(f"{name} {n}" for name, n in sizes.items() if n > 1 or name == "tp")


class GivenSizes(msgspec.Struct, frozen=True):
    """The sizes of a topology that the user gives; a size that is None is open.

    >>> from kvatlas.models import find_gpus
    >>> print(GivenSizes(dp=2).default(find_gpus("8xH100")))
    tp 4, dp 2
    >>> print(*GivenSizes(tp=2).topologies(find_gpus("4xH100")), sep=" / ")
    tp 2, dp 2 / tp 2, pp 2
    """

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    dcp: int | None = None
    ep: int | None = None

    def __post_init__(self) -> None:
        for name, number in msgspec.structs.asdict(self).items():
            if number is not None:
                positive(number, name)

    def default(self, gpus: Gpus) -> Topology:
        """Return one topology of these GPUs, with a default for each open size.

        `tp` defaults to gpus / (pp x dp), and `dp` to gpus / (tp x pp) if `tp` is given. With
        several hosts, `tp` defaults to at most the GPUs of a host. If no size is given, each host
        is then a pipeline stage; otherwise `dp` takes the GPUs that are left. `dcp` and `ep`
        default to 1. If `gpus` is a single GPU, the topology may have any number of GPUs.

        >>> from kvatlas.models import find_gpus
        >>> print(GivenSizes(tp=4).default(find_gpus("H100")))
        tp 4
        >>> print(GivenSizes().default(find_gpus("2x8xH100")))
        tp 8, pp 2
        """
        number, pp = gpus.number, self.pp
        if self.tp is pp is self.dp is None and gpus.hosts > 1:
            pp = gpus.hosts
        stages = 1 if pp is None else pp
        left = max(1, number // (stages * (1 if self.dp is None else self.dp)))
        tp = min(left, gpus.per_host) if self.tp is None else self.tp
        dp = max(1, number // (stages * tp)) if self.dp is None else self.dp
        topology = Topology(tp=tp, pp=stages, dp=dp, dcp=self.dcp or 1, ep=self.ep or 1)
        if number > 1 and topology.gpus != number:
            raise AtlasError(
                Code.CONTRADICTORY,
                f"tp x pp x dp must be the number of GPUs, {number}",
                got=f"{topology}, a product of {topology.gpus}",
                hint="Change or omit tp, pp or dp, or name the GPU without a number",
            )
        check_experts(topology)
        return topology

    def topologies(self, gpus: Gpus) -> Iterator[Topology]:
        """Yield all choices of the open tp, pp and dp; dcp and ep have the given values, or 1.

        The ranks of a pipeline stage share a host, unless the user gives another `tp`. If
        `gpus` is a single GPU, the given sizes determine the number of GPUs.
        """
        number = gpus.number
        if number == 1:
            number = (self.tp or 1) * (self.pp or 1) * (self.dp or 1)
        stages = _divisors(number, MOST_RANKS) if self.pp is None else [self.pp]
        for pp in stages:
            for tp in self._ranks(number, gpus):
                dp = number // (tp * pp)
                if tp * pp * dp == number and self.dp in (None, dp):
                    yield Topology(tp=tp, pp=pp, dp=dp, dcp=self.dcp or 1, ep=self.ep or 1)

    def _ranks(self, number: int, gpus: Gpus) -> list[int]:
        if self.tp is not None:
            return [self.tp]
        found = reversed(_divisors(number, MOST_RANKS))
        return [tp for tp in found if gpus.hosts == 1 or gpus.per_host % tp == 0]


def check_experts(topology: Topology) -> None:
    """Raise an error if `ep` exceeds the number of GPUs that hold the same layers."""
    if topology.ep > topology.stage_gpus:
        raise AtlasError(
            Code.BAD_TOPOLOGY,
            "`ep` must not exceed tp x dp, the number of GPUs that hold the same layers",
            got=f"ep {topology.ep} with {topology}",
            hint=f"Use an ep of at most {topology.stage_gpus}",
        )


def sizes_of(options: dict[str, Any]) -> GivenSizes:
    """Remove the sizes of a topology from `options`, and return them.

    >>> options = {"tp": 2, "max_len": 4096}
    >>> sizes_of(options).tp, options
    (2, {'max_len': 4096})
    """
    return GivenSizes(**{n: options.pop(n, None) for n in GivenSizes.__struct_fields__})


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]
