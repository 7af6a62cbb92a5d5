"""Scales for elements that a kernel casts while it copies them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvatlas.specs.cell_formats import ElementCast


class PlacedScales(NamedTuple):
    """The scales of a copy that casts elements, in a table on the device.

    The runs that are copied begin at pairs of offsets, one in the source and one in the target. A
    pair is called a start (see `address_runs`), and each start has a column in the table.
    """

    table: torch.Tensor
    """[3, starts] of float32: factors, divisors, and the inverses of the divisors."""
    divides: bool
    """Whether a kernel must divide, because multiplying by the inverse is not exact."""


def place_scales(
    cast: ElementCast, which: NDArray[np.int64] | None, starts: int, device: torch.device | str
) -> PlacedScales:
    """Upload the scales of a copy that casts elements, in a table with `starts` columns.

    A start is a pair of offsets, one in the source and one in the target, at which runs of the copy
    begin (see `address_runs`). Column i contains the scales of start i: it uses
    `cast.scales[which[i]]`, or `cast.scales[0]` if `which` is None. The rows of the table are
    factors, divisors and inverses of the divisors.

    >>> from kvatlas.geometry import DType
    >>> cast = ElementCast(DType.of("bf16"), DType.of("fp8"), ((1.0, 0.5), (1.0, 4.0)))
    >>> place_scales(cast, np.array([0, 1, 1]), 3, "cpu")
    PlacedScales(table=tensor([[1.0000, 1.0000, 1.0000],
            [0.5000, 4.0000, 4.0000],
            [2.0000, 0.2500, 0.2500]]), divides=False)
    """
    factors, divisors = np.array(cast.scales, dtype=np.float64).T
    powers = (np.frexp(divisors)[0] == 0.5) & (divisors >= 2**-64) & (divisors <= 2**64)
    with np.errstate(all="ignore"):  # Overflow gives 0 or infinity, the same as in the codecs.
        rows = np.stack([factors, divisors]).astype(np.float32)
        rows = np.concatenate([rows, 1 / rows[1:]])
    every = rows[:, np.zeros(starts, np.int64) if which is None else which]
    table = torch.from_numpy(np.ascontiguousarray(every)).to(device)
    return PlacedScales(table, not powers.all())
