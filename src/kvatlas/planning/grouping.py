"""Which layers share a block table, as vLLM 0.32 decides it.

Layers of one group share a block table; groups overlay one pool, so their pages
must fit together. The rules are tried in order and the first that fits is taken:

1. all layers alike: one group;
2. all layers need the same tokens, though their pages differ: one mixed group;
3. in block-outermost orders, unlike pages are packed side by side into blocks;
4. otherwise pages are made equal (larger blocks, or padding), and layers of a kind
   are dealt into groups of equally many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Layout
from kvatlas.geometry.integers import ceil_div
from kvatlas.planning.sized_layers import (
    FULL_KINDS,
    SLIDING_KINDS,
    Kind,
    SizedLayer,
    heads_on_rank,
)
from kvatlas.specs import Attention

STRETCH = 1.5
"""A group is widened to the largest kind while that is less than this times the smallest."""


_PROMOTED: dict[Kind, Kind] = {
    "sliding_window": "full_attention",
    "chunked_local_attention": "full_attention",
    "sliding_window_mla": "mla_attention",
}
"""What local attention is called where it is kept at full length."""


@dataclass(frozen=True, slots=True)
class GroupDraft:
    """A group in the making. Mixed groups keep each layer's own page."""

    layers: tuple[SizedLayer, ...]
    mixed: bool

    @property
    def regions(self) -> list[tuple[SizedLayer, ...]]:
        """Layers that lie in one region of memory: alike, in order of appearance."""
        if not self.mixed:
            return [self.layers] if self.layers else []
        return [tuple(layers) for layers in _by(attrgetter("key"), self.layers).values()]


def dealt(layers: Sequence[SizedLayer], groups: int) -> list[GroupDraft]:
    """Layers dealt into groups of alike pages, the first to each in turn."""
    return [GroupDraft(tuple(layers[i::groups]), mixed=False) for i in range(groups)]


def group_layers(layers: list[SizedLayer], layout: Layout) -> list[GroupDraft]:
    """The groups of a model's layers."""
    if not layers:
        return []
    if alike(layers):
        return [GroupDraft(tuple(layers), mixed=False)]
    if same_tokens(layers):
        return [GroupDraft(tuple(layers), mixed=True)]
    if layout.block_outermost and len({layer.nbytes for layer in layers}) > 1:
        return pack_unlike_pages(layers)
    return deal_equal_pages(unify_pages(layers))


def alike(layers: list[SizedLayer]) -> bool:
    """One block table and one kind of page serve all of them."""
    return len({_merged(layer) for layer in layers}) == 1


def same_tokens(layers: list[SizedLayer]) -> bool:
    """All need blocks for the same tokens, so one block table serves them, whatever their pages."""
    first = layers[0]
    if len({layer.block for layer in layers}) > 1:
        return False
    if first.kind in FULL_KINDS:
        return all(layer.kind in FULL_KINDS for layer in layers)
    if first.kind == "recurrent":
        held = (first.kind, first.nbytes, first.checkpoints)
        return all((layer.kind, layer.nbytes, layer.checkpoints) == held for layer in layers)
    kinds = SLIDING_KINDS if first.kind == "sliding_window" else (first.kind,)
    seen = first.spec.visibility
    return all(layer.kind in kinds and layer.spec.visibility == seen for layer in layers)


def promote(layers: list[SizedLayer]) -> list[SizedLayer]:
    """Windows and chunks kept at full length, as without a hybrid manager."""
    if alike(layers) or same_tokens(layers):
        return layers
    full = {layer.block for layer in layers if layer.kind in FULL_KINDS}
    promoted = []
    for layer in layers:
        kind = _PROMOTED.get(layer.kind)
        if kind and full:
            block = layer.block if len(full) > 1 else min(full)
            padded = layer.padded
            if padded is not None:
                padded = max(padded, layer.page.unpadded * block // layer.block)
            layer = replace(layer, kind=kind, block=block, padded=padded)
        promoted.append(layer)
    if not (alike(promoted) or same_tokens(promoted)):
        raise AtlasError(
            Code.PAGES_NOT_UNIFIED,
            "One group cannot serve all layers",
            got=f"layers of kinds {sorted({layer.kind for layer in layers})}",
            hint="Use policy vllm or atlas",
        )
    return promoted


def unify_pages(layers: list[SizedLayer]) -> list[SizedLayer]:
    """All pages as large as the largest: by larger blocks where they fit, else by padding."""
    largest = max(layer.nbytes for layer in layers)
    unified = []
    for layer in layers:
        if layer.nbytes == largest:
            unified.append(layer)
        elif layer.kind != "recurrent" and largest % layer.nbytes == 0:
            block = layer.block * (largest // layer.nbytes)
            unified.append(replace(layer, block=block, padded=layer.padded and largest))
        elif layer.kind == "mla_attention":
            raise AtlasError(
                Code.PAGES_NOT_UNIFIED,
                "Latent pages are whole rows and cannot be padded to another page's size",
                got=f"{layer.name} with a page of {layer.nbytes} beside one of {largest}",
                hint="Use a block-outermost order such as BLHNC, or policy atlas",
            )
        else:
            unified.append(replace(layer, padded=largest))
    return unified


def deal_equal_pages(layers: list[SizedLayer]) -> list[GroupDraft]:
    """Layers of each kind dealt into groups of equally many."""
    kinds = _by(_merged, layers).values()
    counts = [len(kind) for kind in kinds]
    width = max(counts) if max(counts) < STRETCH * min(counts) else min(counts)
    return [group for kind in kinds for group in dealt(kind, ceil_div(len(kind), width))]


def pack_unlike_pages(layers: list[SizedLayer]) -> list[GroupDraft]:
    """Groups whose unlike pages lie side by side in a block.

    Kinds that need the same tokens are kept together. Where such a set repeats a
    pattern, one layer of each page size, it is cut into groups of as many repeats as
    leave the least unused; states are cut further, so as not to widen the block.
    """
    sets = [list(group.layers) for group in by_tokens(layers)]
    by_page = [_by(attrgetter("nbytes"), members) for members in sets]
    repeats = [max(map(len, pages.values())) for pages in by_page]
    regular = [len({len(members) for members in pages.values()}) == 1 for pages in by_page]
    even = [i for i in range(len(sets)) if regular[i]]
    floor = max((repeats[i] for i in even if len(by_page[i]) > 1), default=0)
    each = _fewest_unused([repeats[i] for i in even], floor)

    def cuts(i: int) -> int:
        return ceil_div(repeats[i], each) if each and regular[i] else 1

    def is_state(i: int) -> bool:
        kind = sets[i][0].kind
        return kind == "recurrent" or (not each and kind in SLIDING_KINDS)

    widest = max(
        _width(by_page[i], len(sets[i]) if is_state(i) else cuts(i)) for i in range(len(sets))
    )
    groups = []
    for i, members in enumerate(sets):
        count = cuts(i)
        if is_state(i):
            fit = max(widest // members[0].nbytes, 1)
            count = max(count, ceil_div(len(members), fit))
        if count == 1:
            groups.append(GroupDraft(tuple(members), mixed=True))
            continue
        pattern = list(zip(*by_page[i].values(), strict=False))
        for first in range(count):
            repeated = [layer for repeat in pattern[first::count] for layer in repeat]
            groups.append(GroupDraft(tuple(repeated), mixed=True))
    if sum(len(group.layers) for group in groups) < len(layers):
        raise AtlasError(
            Code.PAGES_NOT_UNIFIED,
            "Layers that need the same tokens do not repeat a pattern of page sizes",
            got=f"{[len(members) for members in sets]} layers in sets of unlike pages",
            hint="Use policy atlas, which gives each set one group",
        )
    return [group for group in groups if group.layers]


def kinds_of(layers: Iterable[SizedLayer]) -> list[list[SizedLayer]]:
    """Layers that one block table and one kind of page serve, together."""
    return list(_by(_merged, layers).values())


def by_tokens(layers: list[SizedLayer]) -> list[GroupDraft]:
    """One group for all layers that need the same tokens, whatever their pages."""
    sets: list[list[SizedLayer]] = []
    homes: dict[tuple[object, ...], list[SizedLayer]] = {}
    for layer in layers:
        need = (layer.spec, layer.kind, layer.block, layer.nbytes, layer.checkpoints)
        home = homes.get(need)
        if home is None:
            home = next((members for members in sets if same_tokens([members[0], layer])), None)
        if home is None:
            home = []
            sets.append(home)
        homes[need] = home
        home.append(layer)
    return [GroupDraft(tuple(members), mixed=True) for members in sets]


def _merged(layer: SizedLayer) -> tuple[object, ...]:
    """A layer's key, but for windows that are kept at full length anyway."""
    spec = layer.spec
    if layer.kind != "full_attention" or not isinstance(spec, Attention):
        return layer.key
    row = (spec.head_dim, spec.v_dim or spec.head_dim, spec.dtype, spec.cache, spec.packed_as)
    heads = heads_on_rank(spec.heads, layer.tp)
    return (layer.kind, heads, row, layer.block, layer.padded, layer.apart)


def _by(
    key: Callable[[SizedLayer], Any], layers: Iterable[SizedLayer]
) -> dict[Any, list[SizedLayer]]:
    """Layers of equal keys together, in order of appearance."""
    together: dict[Any, list[SizedLayer]] = {}
    for layer in layers:
        together.setdefault(key(layer), []).append(layer)
    return together


def _width(pages: dict[int, list[SizedLayer]], groups: int) -> int:
    return sum(ceil_div(len(layers), groups) * nbytes for nbytes, layers in pages.items())


def _fewest_unused(counts: list[int], floor: int) -> int:
    """Repeats in each group so that rounding up leaves the fewest unused; the larger of equals."""
    if not floor:
        return 0
    tried = range(floor, max([floor, *counts]) + 1)
    return min(tried, key=lambda each: (sum(-n % each for n in counts), -each))
