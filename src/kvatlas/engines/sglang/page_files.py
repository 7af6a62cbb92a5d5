"""Objects of SGLang's HiCache: the pages of host memory in files, and their names.

Two schemes of names exist in SGLang 0.5.23. The file backend stores one object per page and rank,
in the order of the host layout (`rank_suffix`). The unified scheme, which SGLang defines but does
not use yet, cuts a page of layout page_unified into layers and head groups (`PageNamespace`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvatlas.engines.engine_memory import model_for
from kvatlas.engines.object_files import ObjectFiles
from kvatlas.engines.paged_buffer import PagedBuffer, attention_layers
from kvatlas.errors import AtlasError, Code
from kvatlas.specs import LatentAttention

HEAD_PAGES = {
    "layer_first": "SLNHC",
    "page_first": "SNLHC",
    "page_first_direct": "SLNHC",
    "page_head": "SHNLC",
    "page_unified": "LSNHC",
}
"""The axes of a stored page with K and V, from the outermost, by host layout."""
ROW_PAGES = {
    "layer_first": "LNHC",
    "page_first": "NLHC",
    "page_first_direct": "LNHC",
    "page_unified": "LNC",
}
"""The axes of a stored page of latent rows."""

_TOKEN_BYTES = 4


def page_hashes(tokens: Sequence[int], page: int, *, prior: str | None = None) -> list[str]:
    """Return SGLang's hashes of a prompt's pages; an incomplete last page has no hash.

    The hash of a page covers its tokens and all tokens before the page. `prior` is the hash of the
    page before the first one.

    >>> [one[:8] for one in page_hashes(range(40), 16)]
    ['5d85718e', '4681c010']
    """
    found: list[str] = []
    before = bytes.fromhex(prior) if prior else b""
    for start in range(0, len(tokens) - page + 1, page):
        own = tokens[start : start + page]
        if not all(0 <= token < 1 << 8 * _TOKEN_BYTES for token in own):
            raise AtlasError(
                Code.OUT_OF_RANGE,
                "A token id must fit in 32 bits",
                got=next(t for t in own if not 0 <= t < 1 << 8 * _TOKEN_BYTES),
                hint="Pass token ids of the model",
            )
        digest = hashlib.sha256(before + struct.pack(f"<{page}I", *own)).digest()
        found.append(digest.hex())
        before = digest
    return found


def rank_suffix(
    model_name: str, *, tp: int = 1, rank: int = 0, pp: int = 1, stage: int = 0, mla: bool = False
) -> str:
    """Return the suffix that SGLang's file backend appends to the hash of a page.

    >>> rank_suffix("org/model", tp=2, rank=1)
    '_org-model_1_2'
    """
    name, stages = model_name.replace("/", "-"), f"_{pp}_{stage}" if pp > 1 else ""
    return f"_{name}{stages}" if mla else f"_{name}_{rank}_{tp}{stages}"


class PageNamespace(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that objects of the unified scheme share. Each name contains their digest.

    >>> space = PageNamespace(
    ...     model_id="org/model", dtype="bfloat16", page_size=64, total_kv_heads=8, head_group=4
    ... )
    >>> space.name("ab" * 32, layers=(0, 36), group=1)[-39:]
    'abababab_ukv1-e8319434ab5ae1e7_L0-36_H1'
    """

    # The digest is that of the encoded fields, in this order.
    schema_version: int = 1
    model_id: str
    dtype: str
    page_size: int
    rank_replicated: bool = False
    total_kv_heads: int
    layer_partition: int = 0
    head_group: int
    object_layout: str = "page-unified-v1"

    @property
    def digest(self) -> str:
        """The digest of the namespace, as names contain it."""
        encoded = hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()
        return f"ukv{self.schema_version}-{encoded[:16]}"

    def name(self, page_hash: str, *, layers: tuple[int, int], group: int = 0) -> str:
        """Return the name of an object, which contains one part of a page.

        The object contains the layers `layers[0] .. layers[1] - 1` of head group `group`.
        """
        head = "" if self.rank_replicated else f"_H{group}"
        return f"{page_hash}_{self.digest}_L{layers[0]}-{layers[1]}{head}"


class PageFiles(ObjectFiles):
    """The folder of SGLang's file backend (`HiCacheFile`), as a store of pages."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder, ending=".bin")


def page_buffer(
    model: Any,
    layout: str,
    *,
    pages: int,
    page: int,
    layers: Sequence[int] | None = None,
    tp: int = 1,
    max_len: int | None = None,
) -> PagedBuffer:
    """Allocate a buffer for stored pages; row n of its bytes is the content of page n's object.

    `layout` is the host layout of the SGLang process. `layers` lists the decoder layers of an
    object, by default all. `tp` is the number of ranks. For objects that contain one head group,
    `tp` is the number of head groups of the model.

    >>> page_buffer("Qwen3-8B", "page_first", pages=2, page=64).pages.shape
    (2, 9437184)
    """
    loaded = model_for("sglang", model)
    indices = sorted({one.index for one in loaded.layers}) if layers is None else layers
    held = attention_layers(loaded, indices)
    known = ROW_PAGES if isinstance(held[0].spec, LatentAttention) else HEAD_PAGES
    if layout not in known:
        raise AtlasError(
            Code.ENGINE_REFUSES,
            "SGLang does not store pages of this host layout",
            got=repr(layout),
            hint=f"Use one of {', '.join(known)}",
        )
    return PagedBuffer.of(
        loaded, held, known[layout], page=page, pages=pages, tp=tp, max_len=max_len
    )
