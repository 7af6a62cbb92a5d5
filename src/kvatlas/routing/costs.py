"""Cost of a transfer: the number and sizes of its descriptors, and the faster of two methods.

A direct transfer pays a fixed cost per descriptor. A staged transfer gathers everything into one
buffer, sends it in large pieces and scatters it at the other end. The faster method depends on
the transport and the machine, so the rates are inputs. The defaults of `Costs` were measured on
one machine; the movers of `kvatlas.copying` measure their own rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.routing.binding import Copy


@dataclass(frozen=True, slots=True)
class Costs:
    """Rates for cost estimates; the defaults were measured with NIXL over UCX on one host."""

    descriptor: float = 7e-6
    """Seconds per descriptor, in addition to its bytes."""
    wire: float = 5.3e9
    """Transport bandwidth for long runs, in bytes per second."""
    copy: float = 5.2e9
    """Bandwidth of a gather or scatter at one end, in bytes per second."""
    piece: int = 4 << 20
    """Size of a staged piece in bytes. One piece is gathered while another is sent."""

    def __post_init__(self) -> None:
        rates = (self.wire, self.copy, self.piece)
        if not all(np.isfinite(rate) and rate > 0 for rate in rates) or not self.descriptor >= 0:
            problem = (
                "`wire`, `copy` and `piece` must be positive, and `descriptor` must not be negative"
            )
            hint = "Pass measured values, or omit them to use the defaults"
            raise AtlasError(Code.BAD_SIZE, problem, got=self, hint=hint)

    def direct(self, descriptors: int, nbytes: int) -> float:
        """Estimate the seconds of a transfer with one descriptor per run."""
        return descriptors * self.descriptor + nbytes / self.wire

    def staged(self, nbytes: int) -> float:
        """Estimate the seconds of a transfer that gathers, sends large pieces and scatters.

        The source gathers a piece while the destination receives and scatters the previous piece.
        """
        pieces = -(-nbytes // self.piece)
        received = nbytes / self.wire + nbytes / self.copy
        first = min(nbytes, self.piece) / self.copy
        return received + first + pieces * self.descriptor

    def coalesced(self, descriptors: int, nbytes: int) -> float:
        """Estimate the seconds of a coalesced transfer.

        Each source run is read into one buffer, and then the buffer is scattered.
        """
        return self.direct(descriptors, nbytes) + nbytes / self.copy


@dataclass(frozen=True)
class Report:
    """Number and sizes of a transfer's descriptors, and its estimated cost by two methods."""

    descriptors: int
    nbytes: int
    smallest: int
    median: int
    largest: int
    sizes: dict[int, int]
    """Number of descriptors by size: key n counts those of n to 2 * n - 1 bytes."""
    costs: Costs = field(repr=False)

    @property
    def direct(self) -> float:
        """Estimated seconds of the transfer with one descriptor per run."""
        return self.costs.direct(self.descriptors, self.nbytes)

    @property
    def staged(self) -> float:
        """Estimated seconds of the transfer through staging buffers."""
        return self.costs.staged(self.nbytes)

    @property
    def stage(self) -> bool:
        """Whether a staged transfer is faster than a direct one."""
        return self.staged < self.direct


def report(copies: Sequence[Copy], costs: Costs | None = None) -> Report:
    """Return the number and sizes of the runs of a transfer, and its estimated cost.

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
