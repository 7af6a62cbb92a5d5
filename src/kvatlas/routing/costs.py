"""What a transfer costs: how many descriptors, how long they are, and which way is faster.

Direct descriptors cost something each; a staged copy gathers everything into one buffer,
sends that in large pieces and scatters it at the other end. Which wins depends on the
transport and the machine, so the figures are inputs: `Costs` has those of one that was
measured, and whoever moves bytes measures its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.routing.binding import Copy


@dataclass(frozen=True, slots=True)
class Costs:
    """What moving bytes costs; the defaults are NIXL over UCX between two processes of a host."""

    descriptor: float = 7e-6
    """Seconds for each descriptor, beyond its bytes."""
    wire: float = 5.3e9
    """Bytes a second over the transport, in long runs."""
    copy: float = 5.2e9
    """Bytes a second of a gather or a scatter at one end."""
    piece: int = 4 << 20
    """Bytes of a staged piece: one is gathered while another is sent."""

    def __post_init__(self) -> None:
        rates = (self.wire, self.copy, self.piece)
        if not all(np.isfinite(rate) and rate > 0 for rate in rates) or not self.descriptor >= 0:
            problem = "A rate is not above zero, or a cost is below it"
            raise AtlasError(Code.BAD_SIZE, problem, got=self, hint="Measure, or leave them out")

    def direct(self, descriptors: int, nbytes: int) -> float:
        """Seconds with a descriptor for every run."""
        return descriptors * self.descriptor + nbytes / self.wire

    def staged(self, nbytes: int) -> float:
        """Seconds with a gather, large pieces and a scatter.

        A piece is gathered at one end while the other receives and scatters the last one.
        """
        pieces = -(-nbytes // self.piece)
        received = nbytes / self.wire + nbytes / self.copy
        first = min(nbytes, self.piece) / self.copy
        return received + first + pieces * self.descriptor

    def landed(self, descriptors: int, nbytes: int) -> float:
        """Seconds with runs as long as they are at the source, and a scatter."""
        return self.direct(descriptors, nbytes) + nbytes / self.copy


@dataclass(frozen=True)
class Report:
    """Descriptors of a transfer, their sizes, and the two ways to carry it out."""

    descriptors: int
    nbytes: int
    smallest: int
    median: int
    largest: int
    sizes: dict[int, int]
    """How many descriptors have at least this many bytes, and less than twice as many."""
    costs: Costs = field(repr=False)

    @property
    def direct(self) -> float:
        """Seconds with a descriptor for every run."""
        return self.costs.direct(self.descriptors, self.nbytes)

    @property
    def staged(self) -> float:
        """Seconds by way of staging buffers."""
        return self.costs.staged(self.nbytes)

    @property
    def stage(self) -> bool:
        """Whether a staged copy beats direct descriptors."""
        return self.staged < self.direct


def report(copies: Sequence[Copy], costs: Costs | None = None) -> Report:
    """Count and weigh the runs of a transfer.

    >>> runs = np.array([0, 4096]), np.array([0, 8192]), np.array([4096, 1024])
    >>> counted = report([Copy(0, 0, *runs)])
    >>> counted.descriptors, counted.nbytes, counted.sizes, counted.stage
    (2, 5120, {1024: 1, 4096: 1}, True)
    """
    lengths = np.concatenate([np.zeros(0, np.int64), *(copy.length for copy in copies)])
    if not len(lengths):
        return Report(0, 0, 0, 0, 0, {}, costs or Costs())
    powers, counts = np.unique(np.frexp(lengths.astype(float))[1] - 1, return_counts=True)
    return Report(
        descriptors=len(lengths),
        nbytes=int(lengths.sum()),
        smallest=int(lengths.min()),
        median=int(np.median(lengths)),
        largest=int(lengths.max()),
        sizes={1 << int(p): int(n) for p, n in zip(powers, counts, strict=True)},
        costs=costs or Costs(),
    )
