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

from dataclasses import dataclass, replace

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Layout, Sharding, ceil_div
from kvatlas.planning.sized_layers import FULL_KINDS, SLIDING_KINDS, Want
from kvatlas.specs import Attention

STRETCH = 1.5
"""A group is widened to the largest kind while that is less than this times the smallest."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A group in the making. Mixed groups keep each layer's own page."""

    wants: tuple[Want, ...]
    mixed: bool

    @property
    def regions(self) -> list[tuple[Want, ...]]:
        """Layers that lie in one region of memory: alike, in order of appearance."""
        if not self.mixed:
            return [self.wants] if self.wants else []
        found: dict[tuple[object, ...], list[Want]] = {}
        for want in self.wants:
            found.setdefault(want.key, []).append(want)
        return [tuple(wants) for wants in found.values()]


def group_layers(wants: list[Want], layout: Layout) -> list[Draft]:
    """The groups of a model's layers."""
    if not wants:
        return []
    if alike(wants):
        return [Draft(tuple(wants), mixed=False)]
    if same_tokens(wants):
        return [Draft(tuple(wants), mixed=True)]
    if layout.block_outermost and len({want.nbytes for want in wants}) > 1:
        return pack_unlike_pages(wants)
    return deal_equal_pages(unify_pages(wants))


def alike(wants: list[Want]) -> bool:
    """One block table and one kind of page serve all of them."""
    return len({_merged(want) for want in wants}) == 1


def same_tokens(wants: list[Want]) -> bool:
    """All need blocks for the same tokens, so one block table serves them, whatever their pages."""
    first = wants[0]
    if len({want.block for want in wants}) > 1:
        return False
    if first.kind in FULL_KINDS:
        return all(want.kind in FULL_KINDS for want in wants)
    if first.kind == "recurrent":
        return all(
            want.kind == "recurrent"
            and (want.nbytes, want.checkpoints) == (first.nbytes, first.checkpoints)
            for want in wants
        )
    kinds = SLIDING_KINDS if first.kind == "sliding_window" else (first.kind,)
    return all(want.kind in kinds and want.window == first.window for want in wants)


def promote(wants: list[Want]) -> list[Want]:
    """Windows and chunks kept at full length, as without a hybrid manager."""
    if alike(wants) or same_tokens(wants):
        return wants
    full = {want.block for want in wants if want.kind in FULL_KINDS}
    block = full.pop() if len(full) == 1 else None
    local = {
        "sliding_window": "full_attention",
        "chunked_local_attention": "full_attention",
        "sliding_window_mla": "mla_attention",
    }
    promoted = []
    for want in wants:
        kind = local.get(want.kind)
        if kind and any(other.kind in FULL_KINDS for other in wants):
            size = block or want.block
            padded = want.padded
            if padded is not None:
                padded = max(padded, want.page.unpadded * size // want.block)
            want = replace(want, kind=kind, block=size, padded=padded)  # type: ignore[arg-type]
        promoted.append(want)
    if not (alike(promoted) or same_tokens(promoted)):
        raise AtlasError(
            Code.PAGES_NOT_UNIFIED,
            "Without groups all layers keep all tokens",
            got=f"layers of kinds {sorted({want.kind for want in wants})}",
            hint="Use policy vllm or atlas for models with recurrent layers",
        )
    return promoted


def unify_pages(wants: list[Want]) -> list[Want]:
    """All pages as large as the largest: by larger blocks where they fit, else by padding."""
    largest = max(want.nbytes for want in wants)
    unified = []
    for want in wants:
        if want.nbytes == largest:
            unified.append(want)
        elif want.kind != "recurrent" and largest % want.nbytes == 0:
            unified.append(want.with_block(want.block * (largest // want.nbytes)))
        elif want.kind == "mla_attention":
            raise AtlasError(
                Code.PAGES_NOT_UNIFIED,
                "Latent pages are whole rows and are not padded to another page's size",
                got=f"{want.layer.name} with a page of {want.nbytes} beside one of {largest}",
                hint="Use a block-outermost order such as BLHNC, or policy atlas",
            )
        else:
            unified.append(replace(want, padded=largest))
    return unified


def deal_equal_pages(wants: list[Want]) -> list[Draft]:
    """Layers of each kind dealt into groups of equally many, the first to each in turn."""
    kinds: dict[tuple[object, ...], list[Want]] = {}
    for want in wants:
        kinds.setdefault(_merged(want), []).append(want)
    counts = [len(layers) for layers in kinds.values()]
    width = max(counts) if max(counts) < STRETCH * min(counts) else min(counts)
    drafts = []
    for layers in kinds.values():
        groups = ceil_div(len(layers), width)
        drafts += [Draft(tuple(layers[i::groups]), mixed=False) for i in range(groups)]
    return drafts


def pack_unlike_pages(wants: list[Want]) -> list[Draft]:
    """Groups whose unlike pages lie side by side in a block.

    Kinds that need the same tokens are kept together. Where such a set repeats a
    pattern, one layer of each page size, it is cut into groups of as many repeats as
    leave the least unused; states are cut further, so as not to widen the block.
    """
    sets = [list(draft.wants) for draft in by_tokens(wants)]
    by_page = [_by_page(found) for found in sets]
    repeats = [max(map(len, pages.values())) for pages in by_page]
    regular = [len({len(layers) for layers in pages.values()}) == 1 for pages in by_page]
    floor = max(
        (
            n
            for n, pages, even in zip(repeats, by_page, regular, strict=True)
            if even and len(pages) > 1
        ),
        default=0,
    )
    each = _fewest_unused([n for n, even in zip(repeats, regular, strict=True) if even], floor)

    def cuts(i: int) -> int:
        return ceil_div(repeats[i], each) if each and regular[i] else 1

    def is_state(i: int) -> bool:
        kind = sets[i][0].kind
        return kind == "recurrent" or (not each and kind in SLIDING_KINDS)

    widest = max(
        _width(by_page[i], len(sets[i]) if is_state(i) else cuts(i)) for i in range(len(sets))
    )
    drafts = []
    for i, found in enumerate(sets):
        groups = cuts(i)
        if is_state(i):
            fit = max(widest // found[0].nbytes, 1)
            groups = max(groups, ceil_div(len(found), fit))
        if groups == 1:
            drafts.append(Draft(tuple(found), mixed=True))
            continue
        pattern = list(zip(*by_page[i].values(), strict=False))
        for first in range(groups):
            layers = [want for repeat in pattern[first::groups] for want in repeat]
            drafts.append(Draft(tuple(layers), mixed=True))
    if sum(len(draft.wants) for draft in drafts) < len(wants):
        raise AtlasError(
            Code.PAGES_NOT_UNIFIED,
            "Layers that need the same tokens repeat a pattern, one layer of each page size",
            got=f"{[len(found) for found in sets]} layers in sets of unlike pages",
            hint="Use policy atlas, which gives each set one group",
        )
    return [draft for draft in drafts if draft.wants]


def by_tokens(wants: list[Want]) -> list[Draft]:
    """One group for all layers that need the same tokens, whatever their pages."""
    sets: list[list[Want]] = []
    for want in wants:
        home = next((found for found in sets if same_tokens([found[0], want])), None)
        if home is None:
            sets.append([want])
        else:
            home.append(want)
    return [Draft(tuple(found), mixed=True) for found in sets]


def _merged(want: Want) -> tuple[object, ...]:
    """A want's key, but for windows that are kept at full length anyway."""
    spec = want.layer.spec
    if want.kind != "full_attention" or not isinstance(spec, Attention):
        return want.key
    row = (spec.head_dim, spec.v_dim or spec.head_dim, spec.dtype, spec.cache, spec.packed_as)
    heads = Sharding.by_heads(spec.heads).size(want.tp)
    return (want.kind, heads, row, want.block, want.padded, want.apart)


def _by_page(wants: list[Want]) -> dict[int, list[Want]]:
    found: dict[int, list[Want]] = {}
    for want in wants:
        found.setdefault(want.nbytes, []).append(want)
    return found


def _width(pages: dict[int, list[Want]], groups: int) -> int:
    return sum(ceil_div(len(layers), groups) * nbytes for nbytes, layers in pages.items())


def _fewest_unused(counts: list[int], floor: int) -> int:
    """Repeats in each group so that rounding up leaves the fewest unused; the larger of equals."""
    if not floor:
        return 0
    tried = range(floor, max([floor, *counts]) + 1)
    return min(tried, key=lambda each: (sum(-n % each for n in counts), -each))
