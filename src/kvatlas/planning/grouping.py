"""Divide layers into groups that share a block table, as vLLM does.

Groups overlay each other in one pool, so their pages must fit together. The first rule that
applies is used:

1. All layers have the same kind of page: one group.
2. All layers need the same tokens but have different pages: one mixed group.
3. The layout is block-outermost and pages differ in size: the different pages of a group are
   packed next to each other in its blocks.
4. Otherwise all pages are made the same size, by larger blocks or padding, and the layers of
   each kind are divided into groups of equal size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import replace

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Layout
from kvatlas.geometry.integers import ceil_div
from kvatlas.planning.sized_layers import (
    FIXED_KINDS,
    FULL_KINDS,
    SLIDING_KINDS,
    Kind,
    SizedLayer,
    heads_on_rank,
)
from kvatlas.specs import Attention

STRETCH = 1.5
"""The threshold that decides the number of layers per group. Divide the number of layers of the
most frequent kind by that of the rarest kind. If the ratio is less than this, a group has as many
layers as the most frequent kind; otherwise it has as many as the rarest kind."""


_PROMOTED: dict[Kind, Kind] = {
    "sliding_window": "full_attention",
    "chunked_local_attention": "full_attention",
    "sliding_window_mla": "mla_attention",
}
"""For each kind of local attention, the kind it becomes if its cache keeps all tokens."""


class GroupDraft(msgspec.Struct, frozen=True):
    """The layers of a future group. If `mixed` is true, their pages may differ."""

    layers: tuple[SizedLayer, ...]
    mixed: bool

    @property
    def regions(self) -> list[tuple[SizedLayer, ...]]:
        """The layers of each region, in order of appearance; a region has one kind of page."""
        if not self.mixed:
            return [self.layers] if self.layers else []
        return [tuple(layers) for layers in _by(attrgetter("key"), self.layers).values()]


def dealt(layers: Sequence[SizedLayer], groups: int) -> list[GroupDraft]:
    """Distribute layers that have the same page over `groups` groups, round-robin."""
    return [GroupDraft(tuple(layers[i::groups]), mixed=False) for i in range(groups)]


def group_layers(layers: list[SizedLayer], layout: Layout) -> list[GroupDraft]:
    """Divide a model's layers into groups, by the rules that this module describes."""
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
    """Return whether all layers can share one block table and one kind of page."""
    keys = map(_merged, layers)
    first = next(keys, None)
    return first is not None and all(key == first for key in keys)


def same_tokens(layers: list[SizedLayer]) -> bool:
    """Return whether all layers need the same tokens, so that they can share a block table."""
    first = layers[0]
    if len({layer.block for layer in layers}) > 1:
        return False
    if first.kind in FULL_KINDS:
        return all(layer.kind in FULL_KINDS for layer in layers)
    if first.kind == "ring":
        return all(
            layer.kind == "ring" and layer.spec.visibility == first.spec.visibility
            for layer in layers
        )
    if first.kind == "recurrent":
        held = (first.kind, first.nbytes, first.checkpoints)
        return all((layer.kind, layer.nbytes, layer.checkpoints) == held for layer in layers)
    kinds = SLIDING_KINDS if first.kind == "sliding_window" else (first.kind,)
    seen = first.spec.visibility
    return all(layer.kind in kinds and layer.spec.visibility == seen for layer in layers)


def promote(layers: list[SizedLayer]) -> list[SizedLayer]:
    """Return the layers, with sliding-window and chunked layers changed to keep all tokens.

    vLLM does the same if its hybrid manager is disabled.
    """
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
            "Policy uniform needs layers that can share one block table",
            got=f"layers of the kinds {', '.join(sorted({layer.kind for layer in layers}))}",
            hint="Pass policy='vllm' or policy='atlas'",
        )
    return promoted


def unify_pages(layers: list[SizedLayer]) -> list[SizedLayer]:
    """Return the layers with all pages enlarged to the size of the largest page.

    A page is enlarged by a larger block if possible, otherwise by padding.
    """
    largest = max(layer.nbytes for layer in layers)
    unified = []
    for layer in layers:
        if layer.nbytes == largest:
            unified.append(layer)
        elif layer.kind not in FIXED_KINDS and largest % layer.nbytes == 0:
            block = layer.block * (largest // layer.nbytes)
            unified.append(replace(layer, block=block, padded=layer.padded and largest))
        elif layer.kind == "mla_attention":
            raise AtlasError(
                Code.PAGES_NOT_UNIFIED,
                "Pages of latent attention cannot be padded to the size of other pages",
                got=f"{layer.name} with a page of {layer.nbytes} bytes; the largest page has "
                f"{largest} bytes",
                hint="Pass a layout= that starts with B, such as 'BLHNC', or policy='atlas'",
            )
        else:
            unified.append(replace(layer, padded=largest))
    return unified


def deal_equal_pages(layers: list[SizedLayer]) -> list[GroupDraft]:
    """Divide layers into groups of equal size, each with layers of one kind."""
    kinds = _by(_merged, layers).values()
    counts = [len(kind) for kind in kinds]
    width = max(counts) if max(counts) < STRETCH * min(counts) else min(counts)
    return [group for kind in kinds for group in dealt(kind, ceil_div(len(kind), width))]


def pack_unlike_pages(layers: list[SizedLayer]) -> list[GroupDraft]:
    """Return groups whose blocks contain pages of different sizes next to each other.

    Layers that need the same tokens form a set. A set can be divided into groups if it has
    equally many layers of each page size. The number of groups is chosen so that the fewest
    pages of a block are unused. Recurrent states and rings are divided into more groups, so they
    do not make the block larger.
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
        return kind in FIXED_KINDS or (not each and kind in SLIDING_KINDS)

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
            "Layers with pages of different sizes cannot be divided into equal groups",
            got=f"sets of {', '.join(str(len(members)) for members in sets)} layers; a set has "
            "all layers that need the same tokens",
            hint="Pass policy='atlas', which makes one group for each page size",
        )
    return [group for group in groups if group.layers]


def kinds_of(layers: Iterable[SizedLayer]) -> list[list[SizedLayer]]:
    """Divide layers into lists of layers that can share a block table and a kind of page."""
    return list(_by(_merged, layers).values())


def by_tokens(layers: list[SizedLayer]) -> list[GroupDraft]:
    """Return one group per set of layers that need the same tokens, even if their pages differ."""
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
    """Return a key that is equal for layers that can share a block table and a kind of page.

    The key does not include the window of a layer that keeps all tokens.
    """
    spec = layer.spec
    if layer.kind != "full_attention" or not isinstance(spec, Attention):
        return layer.key
    row = (spec.head_dim, spec.v_dim or spec.head_dim, spec.dtype, spec.cache, spec.packed_as)
    heads = heads_on_rank(spec.heads, layer.tp)
    return (layer.kind, heads, row, layer.block, layer.padded, layer.apart)


def _by(
    key: Callable[[SizedLayer], Any], layers: Iterable[SizedLayer]
) -> dict[Any, list[SizedLayer]]:
    """Group layers by `key(layer)`. Keys and layers keep their order of appearance."""
    together: dict[Any, list[SizedLayer]] = {}
    for layer in layers:
        together.setdefault(key(layer), []).append(layer)
    return together


def _width(pages: dict[int, list[SizedLayer]], groups: int) -> int:
    return sum(ceil_div(len(layers), groups) * nbytes for nbytes, layers in pages.items())


def _fewest_unused(counts: list[int], floor: int) -> int:
    """Return the number of layers per group that leaves the fewest pages unused.

    Of equally good numbers, the largest is returned. `counts` contains the number of layers of each
    set that is divided into groups. `floor` is the smallest number of layers per group to try.
    """
    if not floor:
        return 0
    tried = range(floor, max([floor, *counts]) + 1)
    return min(tried, key=lambda each: (sum(-n % each for n in counts), -each))
