"""Files of LMCache's file-system connector: one chunk each, after a header of 32-bit integers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvatlas.engines.lmcache.chunks import KNOWN
from kvatlas.engines.object_files import ObjectFiles
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import DType

_FORMATS = {"KV_2LTD": 1, "KV_T2D": 2, "KV_2TD": 3, "KV_MLA_FMT": 6}
_DTYPES = {
    "fp16": (2, "half"),
    "bf16": (3, "bfloat16"),
    "fp32": (4, "float"),
    "uint8": (6, "uint8"),
    "e4m3": (7, "fp8_e4m3fn"),
    "e5m2": (8, "fp8_e5m2"),
}
"""The number of each dtype in headers, and its name in keys."""
_AXES = 4


class ChunkKey(NamedTuple):
    """The key of a chunk, as LMCache's `CacheEngineKey`.

    If `layer` is given, this is the key of a chunk that contains only this layer.

    >>> ChunkKey("org/model", 2, 0, 0xabc, "bf16").name
    'org/model@2@0@abc@bfloat16'
    """

    model: str
    world_size: int
    worker: int
    chunk_hash: int
    """LMCache's hash of all tokens up to the end of the chunk."""
    dtype: str
    layer: int | None = None

    @property
    def name(self) -> str:
        """The key as LMCache writes it."""
        dtype = _dtype(self.dtype)[1]
        parts = [self.model, self.world_size, self.worker, f"{self.chunk_hash:x}", dtype]
        return "@".join(map(str, parts if self.layer is None else [*parts, self.layer]))


class ChunkFiles(ObjectFiles):
    """The folder of LMCache's `FSConnector`, as a store of chunks.

    `fmt`, `dtype` and `shape` describe a whole chunk. The header of each file repeats them. Partial
    chunks and chunks with several groups of layers raise an error. If LMCache was configured with
    `save_chunk_meta: false`, its files have no headers: pass `headers=False`.

    >>> import tempfile
    >>> store = ChunkFiles(tempfile.mkdtemp(), "KV_2LTD", dtype="bf16", shape=(2, 36, 256, 1024))
    >>> store.exists([ChunkKey("org/model", 1, 0, 7, "bf16").name])
    [False]
    """

    def __init__(
        self,
        folder: str | Path,
        fmt: str,
        *,
        dtype: str,
        shape: Sequence[int],
        headers: bool = True,
    ) -> None:
        if fmt not in _FORMATS or not 1 <= len(shape) <= _AXES:
            raise AtlasError(
                Code.ENGINE_REFUSES,
                "kvatlas cannot read chunks of this format of LMCache",
                got=f"{fmt} of shape {tuple(shape)}",
                hint=f"Use one of {', '.join(_FORMATS)}, with up to four axes",
            )
        number, item = _dtype(dtype)[0], DType.of(dtype).item
        total = item
        for size in shape:
            total *= size
        axes = [*shape, *[0] * (_AXES - len(shape))]
        header = struct.pack("=7i", total, _FORMATS[fmt], number, *axes)
        super().__init__(folder, ending=".data", header=header if headers else b"", slash="-SEP-")


def _dtype(dtype: str) -> tuple[int, str]:
    name = DType.of(dtype).name
    if name not in _DTYPES:
        raise AtlasError(
            Code.UNKNOWN_DTYPE,
            f"LMCache {KNOWN[-1]} does not store this dtype",
            got=repr(dtype),
            hint=f"Use one of {', '.join(_DTYPES)}",
        )
    return _DTYPES[name]
