"""Convert cells between formats: decode to float32 and encode again.

A cell is all bytes of one head and token, such as K, V and their scales. `write` and `read` use the
same codecs, so a converted cell has the same bytes as if the decoded row had been written to the
target. Rows in the model's dtype are encoded directly, not by way of float32: the int4 codec first
rounds to the dtype of its input, so it would give other bytes for float32.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvatlas.cache import torch_dtype
from kvatlas.geometry import DType
from kvatlas.kernels.fp8_fp4_formats import to_fp8
from kvatlas.kernels.quantise import Side, decode, encode
from kvatlas.kernels.write_read_latent import (
    decode_latent,
    decode_rows,
    encode_latent,
    encode_rows,
)
from kvatlas.specs import Attention, CellFormat, LatentAttention
from kvatlas.specs.cell_formats import CellRow

Fields = dict[str, torch.Tensor]
ByteArray = TypeVar("ByteArray", NDArray[np.uint8], torch.Tensor)

_ALIGNED = 16
"""Alignment in bytes that torch kernels may assume."""

_AT_ONCE = 4 << 20
"""Bytes of cells per batch on a CPU. Smaller batches spend their time on thread synchronisation."""

_LOOKED_UP = 256 << 10
"""Bytes of indices per table lookup, small enough for the CPU cache."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def convert_cells(cells: ByteArray, source: CellFormat, destination: CellFormat) -> ByteArray:
    """Convert cells [n, bytes] of one format to cells [n, bytes] of another, on the same device.

    A cell is all bytes of one head and token.

    >>> from kvatlas.specs import FullAttention, TensorScales
    >>> specs = [FullAttention(heads=1, head_dim=2, cache=cache) for cache in ("auto", "fp8")]
    >>> rows = torch.tensor([[1.0, 2.0, -3.0, 0.3]], dtype=torch.bfloat16)
    >>> bf16, fp8 = CellFormat(specs[0]), CellFormat(specs[1], scales=TensorScales(0.5, 0.5))
    >>> made = convert_cells(rows.view(torch.uint8), bf16, fp8)
    >>> made.view(torch.float8_e4m3fn).float() * 0.5
    tensor([[ 1.0000,  2.0000, -3.0000,  0.3125]])
    """
    if isinstance(cells, np.ndarray):
        if not cells.flags.writeable:
            cells = cells.copy()
        return convert_cells(torch.from_numpy(cells), source, destination).numpy()
    if cells.data_ptr() % _ALIGNED:
        cells = cells.clone()
    made = torch.empty((len(cells), destination.nbytes), dtype=torch.uint8, device=cells.device)
    if source.by_element and destination.by_element:
        _convert_elements(cells, source, made, destination)
        return made
    each = (
        len(cells) if cells.is_cuda else max(1, _AT_ONCE // max(source.nbytes, destination.nbytes))
    )
    for first in range(0, len(cells), max(1, each)):
        some, into = cells[first : first + each], made[first : first + each]
        fields = {row.name: _view(some, row) for row in source.rows}
        for name, values in _converted(fields, source, destination).items():
            row = destination.row(name)
            stored = values.contiguous().view(torch.uint8)
            into[:, row.at : row.at + row.nbytes].copy_(stored)
    return made


def _convert_elements(
    cells: torch.Tensor, source: CellFormat, made: torch.Tensor, destination: CellFormat
) -> None:
    """Convert cells from `cells` into `made`, both in element-wise formats.

    Adjacent fields (K and V) with equal scales are converted by one call.
    """
    spans: dict[tuple[float, float], list[int]] = {}
    at = 0
    for row in source.rows:
        scales = source.scale(row.name), destination.scale(row.name)
        span = spans.setdefault(scales, [at, at])
        span[1] = at = at + row.items
    one, two = source.rows[0].dtype, destination.rows[0].dtype
    for scales, (first, stop) in spans.items():
        given = cells.view(torch_dtype(one))[:, first:stop]
        into = made.view(torch_dtype(two))[:, first:stop]
        if not cells.is_cuda and one.item <= 2 and 1 in (one.item, two.item):
            _look_up(given, one, into, two, scales)
        elif scales == (1.0, 1.0) and two.item > 1:
            into.copy_(given)
        else:
            into.copy_(_element(given, two, *scales))


def _look_up(
    given: torch.Tensor, one: DType, into: torch.Tensor, two: DType, scales: tuple[float, float]
) -> None:
    """Convert elements `given` of type `one` to type `two`, and write them to `into`.

    Both types have at most 16 bits. `scales` contains the scale of each type. The elements are
    converted with a lookup table: a numpy lookup is faster on a CPU than fp8 casts in torch.
    """
    table = _table(one, two, *scales)
    codes: NDArray[Any] = given.view(_WORDS[one.item]).numpy().view(f"u{one.item}")
    stored: NDArray[Any] = into.view(_WORDS[two.item]).numpy()
    step = max(1, _LOOKED_UP // (8 * given.shape[1]))
    for first in range(0, len(codes), step):
        some = slice(first, first + step)
        np.take(table, codes[some], out=stored[some], mode="clip")


@lru_cache(maxsize=256)
def _table(one: DType, two: DType, from_scale: float, to_scale: float) -> NDArray[Any]:
    """Return a table with the value of type `two` for each bit pattern of type `one`."""
    codes = np.arange(1 << one.bits).astype(f"u{one.item}").view(f"i{one.item}")
    values = torch.from_numpy(codes).view(torch_dtype(one))
    made: NDArray[Any] = _element(values, two, from_scale, to_scale).view(_WORDS[two.item]).numpy()
    return made


def _element(
    values: torch.Tensor, dtype: DType, from_scale: float, to_scale: float
) -> torch.Tensor:
    """Return `values * from_scale / to_scale` in `dtype`, with the same rounding as the codecs."""
    exact = values.float() * from_scale
    if dtype.item > 1:
        return exact.to(torch_dtype(dtype))
    return to_fp8(exact / to_scale, e5m2=dtype.name == "e5m2")


def _view(cells: torch.Tensor, row: CellRow) -> torch.Tensor:
    """Return one field of cells [n, bytes] as [n, elements] in the field's dtype.

    The result is a view if the elements are aligned in the cells, otherwise a copy.
    """
    item, dtype = row.dtype.item, torch_dtype(row.dtype)
    if cells.shape[1] % item or row.at % item:
        return cells[:, row.at : row.at + row.nbytes].contiguous().view(dtype)
    return cells.view(dtype)[:, row.at // item : row.at // item + row.items]


def _converted(fields: Fields, source: CellFormat, destination: CellFormat) -> Fields:
    """Return the fields of cells, converted from format `source` to format `destination`."""
    one: Any = source.spec
    two: Any = destination.spec
    if isinstance(two, Attention):
        return {
            **_side(fields, source, destination, "k"),
            **_side(fields, source, destination, "v"),
        }
    if isinstance(two, LatentAttention):
        latent, rope = decode_latent(one, fields, scale=source.scales.k)
        return encode_latent(two, destination.page, latent, rope, scale=destination.scales.k)
    return encode_rows(two, decode_rows(one, fields))


def _side(fields: Fields, source: CellFormat, destination: CellFormat, side: Side) -> Fields:
    """Return the fields of K or V (`side`), converted from `source` to `destination`."""
    one: Any = source.spec
    two: Any = destination.spec
    from_scale, to_scale = (getattr(end.scales, side) for end in (source, destination))
    plain = one.cache == "auto"
    rows = fields[side] if plain else decode(one, side, fields, scale=from_scale)
    return encode(two, side, rows, scale=to_scale)
