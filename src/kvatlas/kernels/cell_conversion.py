"""Cells of one format into cells of another: decoded to float32 and encoded again.

The codecs are those that write and read caches, so that a converted cell holds what a write
of the decoded row would have left. What the model's own dtype holds is not decoded: codecs
that round to it first (int4) see the dtype that they would see from an engine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvatlas.cache import torch_dtype
from kvatlas.kernels.quantise import Side, decode, encode
from kvatlas.kernels.write_read_latent import (
    decode_latent,
    decode_rows,
    encode_latent,
    encode_rows,
)
from kvatlas.specs import Attention, CellFormat, CellRow, LatentAttention, Recurrent

Fields = dict[str, torch.Tensor]

_ALIGNED = 16
"""Bytes that torch may read at once."""

_AT_ONCE = 256 << 10
"""Bytes of cells that are converted together: they stay in the processor's cache."""


def convert_cells(cells: NDArray[np.uint8], src: CellFormat, dst: CellFormat) -> NDArray[np.uint8]:
    """Cells [n, bytes] of one format as cells [n, bytes] of another.

    >>> from kvatlas.specs import FullAttention, TensorScales
    >>> specs = [FullAttention(heads=1, head_dim=2, cache=cache) for cache in ("auto", "fp8")]
    >>> rows = torch.tensor([[1.0, 2.0, -3.0, 0.3]], dtype=torch.bfloat16)
    >>> bf16, fp8 = CellFormat(specs[0]), CellFormat(specs[1], scales=TensorScales(0.5, 0.5))
    >>> made = convert_cells(rows.view(torch.uint8).numpy(), bf16, fp8)
    >>> torch.from_numpy(made).view(torch.float8_e4m3fn).float() * 0.5
    tensor([[ 1.0000,  2.0000, -3.0000,  0.3125]])
    """
    if cells.ctypes.data % _ALIGNED or not cells.flags.writeable:
        cells = cells.copy()
    made = np.empty((len(cells), dst.nbytes), dtype=np.uint8)
    each = max(1, _AT_ONCE // max(src.nbytes, dst.nbytes))
    given, stored = torch.from_numpy(cells), torch.from_numpy(made)
    for first in range(0, len(cells), each):
        some = given[first : first + each]
        fields = {row.name: _view(some, row) for row in src.rows}
        for name, values in _converted(fields, src, dst).items():
            row = dst.row(name)
            into = stored[first : first + each, row.at : row.at + row.nbytes]
            into.copy_(values.contiguous().view(torch.uint8))
    return made


def _view(cells: torch.Tensor, row: CellRow) -> torch.Tensor:
    """One field of cells [n, bytes] as [n, items]: a view where elements are aligned."""
    item, dtype = row.dtype.item, torch_dtype(row.dtype)
    if cells.shape[1] % item or row.at % item:
        return cells[:, row.at : row.at + row.nbytes].contiguous().view(dtype)
    return cells.view(dtype)[:, row.at // item : row.at // item + row.items]


def _converted(fields: Fields, src: CellFormat, dst: CellFormat) -> Fields:
    """The fields of some cells in the other format."""
    one: Any = src.spec
    two: Any = dst.spec
    if isinstance(two, Recurrent):
        return {name: data.to(torch_dtype(dst.row(name).dtype)) for name, data in fields.items()}
    if isinstance(two, Attention):
        return {**_side(fields, src, dst, "k"), **_side(fields, src, dst, "v")}
    if isinstance(two, LatentAttention):
        latent, rope = decode_latent(one, fields, scale=src.scales.k)
        return encode_latent(two, dst.page, latent, rope, scale=dst.scales.k)
    return encode_rows(two, decode_rows(one, fields))


def _side(fields: Fields, src: CellFormat, dst: CellFormat, side: Side) -> Fields:
    """K or V of some cells."""
    one: Any = src.spec
    two: Any = dst.spec
    from_scale, to_scale = (getattr(end.scales, side) for end in (src, dst))
    plain = one.cache == "auto"
    rows = fields[side] if plain else decode(one, side, fields, scale=from_scale)
    return encode(two, side, rows, scale=to_scale)
