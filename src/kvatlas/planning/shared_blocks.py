"""Blocks that attention and recurrent states of a hybrid share: the search for the smallest.

A block id belongs to one group at a time, so a block holds some attention layers for some
tokens, or some states, or parts of states that are split by heads. Once its tokens and its
bytes are chosen, the rest follows: how many layers of each kind it holds, and so how many
groups, each with a block table, there are. Blocks are tried from the smallest on; those are
found whose requests claim so little that the plan keeps its promise against vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError
from kvatlas.geometry.integers import Whole
from kvatlas.planning.capacity import LENGTHS, PROMISE, steps
from kvatlas.planning.grouping import GroupDraft, dealt, kinds_of
from kvatlas.planning.placing import PlanDraft
from kvatlas.planning.plan_data import DECODING
from kvatlas.planning.plan_parts import Group, blocks_taken
from kvatlas.planning.request import PlanRequest
from kvatlas.planning.sized_layers import SizedLayer, page_of

_SPLITS = (1, 2, 4, 8)
"""Parts that a state may be split into: each is one more call of its kernel."""
_MOST_SIZES = 1024
"""Block sizes that are tried, from the smallest on; real states leave at most a few hundred."""
_BATCH = 16
MOST_TABLES = 64
"""Block tables that an engine may be asked to keep for a request."""
_ALIGNMENT = 128
"""Bytes that blocks start at multiples of, as kernels like it."""

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SharedBlock:
    """A block that holds either some attention layers or some states, or parts of them."""

    tokens: int
    nbytes: int
    splits: int
    """Parts that a state is split into, by heads."""
    groups: tuple[int, ...]
    """Groups, each with a block table, for each kind of layers: attention, then states."""
    padding: float
    """Share of what a request of the greatest length claims that is padding."""

    @property
    def preference(self) -> tuple[float, ...]:
        """Less is better: small blocks, little padding (to a percent), few parts, few tables."""
        return (self.tokens, round(self.padding, 2), self.splits, sum(self.groups))


@dataclass(frozen=True)
class LayerKind:
    """Layers that one block table and one kind of page can serve."""

    layers: Sequence[SizedLayer]

    @property
    def recurrent(self) -> bool:
        """Whether they keep states."""
        return self.layers[0].kind == "recurrent"

    def parts(self, splits: int) -> int:
        """Pages of them all, where states are split into so many parts."""
        return len(self.layers) * (splits if self.recurrent else 1)

    def nbytes(self, tokens: Whole, splits: int) -> Whole:
        """Bytes of such a page; 0 where heads do not divide so far."""
        first = self.layers[0]
        if not self.recurrent:
            return tokens * (first.page.unpadded // first.block)
        try:
            return tokens * 0 + page_of(first.spec, first.block, first.tp * splits).nbytes
        except AtlasError:
            return tokens * 0

    @cached_property
    def held(self) -> int:
        """Blocks of states that a request holds."""
        return 1 + max(layer.checkpoints for layer in self.layers)

    def group(self, tokens: int) -> Group:
        """A group of them, with blocks of so many tokens."""
        first = self.layers[0]
        return Group.of(first.kind, first.spec, block=tokens, pool=0, held=self.held)

    def dealt(self, tokens: int, splits: int, groups: int) -> list[GroupDraft]:
        """Their pages dealt into so many groups."""
        cuts = splits if self.recurrent else 1
        sized = [layer.cut(tokens, cuts, part) for layer in self.layers for part in range(cuts)]
        return dealt(sized, groups)


class SharedBlockSearch:
    """The search through block sizes, beside what vLLM's plan claims for a request.

    Where vLLM has no plan, the blocks with the least padding are found instead.
    """

    def __init__(
        self,
        request: PlanRequest,
        layers: Iterable[SizedLayer],
        *,
        step: int,
        theirs: PlanDraft | None,
    ) -> None:
        self.request, self.step, self.theirs = request, step, theirs
        self.kinds = [LayerKind(alike) for alike in kinds_of(layers)]
        self.tried: set[int] = set()
        """Sizes, in tokens, for which there was any block at all."""

    def blocks(self, largest: int) -> Iterator[SharedBlock]:
        """Blocks of up to `largest` tokens, the preferred first."""
        sizes = np.arange(self.step, largest + 1, self.step)[:_MOST_SIZES]
        if self.theirs is None:
            found = list(self._tried(sizes))
            least = min((round(block.padding, 2) for block in found), default=0.0)
            tight = [block for block in found if round(block.padding, 2) == least]
            yield from sorted(tight, key=lambda block: block.preference)
            return
        # One size at a time would be slow, and the smallest is often among the first.
        for some in np.split(sizes, range(_BATCH, len(sizes), _BATCH)):
            for block in sorted(self._tried(some), key=lambda block: block.preference):
                if self._keeps_promise(block):
                    yield block

    def groups_of(self, block: SharedBlock) -> tuple[GroupDraft, ...]:
        """The layers of each group."""
        return tuple(
            group
            for kind, count in zip(self.kinds, block.groups, strict=True)
            for group in kind.dealt(block.tokens, block.splits, count)
        )

    def preference(self, draft: PlanDraft) -> tuple[float, ...]:
        """A draft of another making, as `SharedBlock.preference` has it."""
        claimed = int(_claimed(draft, self.request, self._longest, self.request.in_flight)[0])
        return (draft.size.tokens, round(1 - self._useful / claimed, 2), 1, len(draft.groups))

    def _tried(self, tokens: Numbers) -> Iterator[SharedBlock]:
        """Blocks of these sizes that keep the promise at a few lengths."""
        held = {n: self._held(tokens, n) for n in (DECODING, self.request.in_flight)}
        for splits in _SPLITS:
            at, counts, nbytes = self._ways_to_deal(tokens, splits)
            self.tried |= set(tokens[at].tolist())
            # Most fail at the greatest length already, where attention is nearly all there is.
            for last in (True, False):
                lengths = slice(-1, None) if last else slice(None)
                shares, claims = np.full(len(at), np.inf), np.empty((len(at), 0))
                for in_flight, blocks in held.items():
                    claims = np.einsum("ik,ikl->il", counts, blocks[at, :, lengths])
                    claims *= nbytes[:, None]
                    theirs = self._theirs[in_flight][lengths]
                    shares = np.minimum(shares, (theirs / claims).min(axis=1))
                kept = shares >= PROMISE
                at, counts, nbytes, claims = at[kept], counts[kept], nbytes[kept], claims[kept]
            wasted = 1 - self._useful / claims[:, -1]
            for i, waste in enumerate(wasted.tolist()):
                groups = tuple(counts[i].tolist())
                yield SharedBlock(int(tokens[at[i]]), int(nbytes[i]), splits, groups, waste)

    def _held(self, tokens: Numbers, in_flight: int) -> Numbers:
        """Blocks that a request holds: for each size, of a group of each kind, at few lengths."""
        lengths, dcp = self._few_lengths, self.request.dcp
        held = np.empty((len(tokens), len(self.kinds), len(lengths)), dtype=np.int64)
        for k, kind in enumerate(self.kinds):
            if kind.recurrent:
                held[:, k] = kind.held
                continue
            for i, size in enumerate(tokens.tolist()):
                held[i, k] = kind.group(size).blocks(lengths, in_flight=in_flight, dcp=dcp)
        return held

    def _ways_to_deal(self, tokens: Numbers, splits: int) -> tuple[Numbers, Numbers, Numbers]:
        """(which size, groups of each kind, bytes) of all blocks that layers or states fill."""
        parts = np.array([kind.parts(splits) for kind in self.kinds])
        sizes = np.stack([kind.nbytes(tokens, splits) for kind in self.kinds], axis=1)
        if not sizes.all():
            sizes, tokens = sizes[:0], tokens[:0]
        filled = [sizes[:, [k]] * np.arange(1, n + 1) for k, n in enumerate(parts)]
        fits = np.minimum(np.concatenate(filled, axis=1)[:, :, None] // sizes[:, None], parts)
        counts = -(-parts // np.maximum(fits, 1))
        sound = (fits > 0).all(axis=2) & (counts.sum(axis=2) <= MOST_TABLES)
        at, counts = np.nonzero(sound)[0], counts[sound]
        # Layers are dealt evenly: the fullest group says how large a block is.
        nbytes = (-(-parts // counts) * sizes[at]).max(axis=1)
        aligned = nbytes % _ALIGNMENT == 0
        return at[aligned], counts[aligned], nbytes[aligned]

    def _keeps_promise(self, block: SharedBlock) -> bool:
        """Whether it fits enough at every length."""
        if self.theirs is None:
            return True
        groups = self._groups(block.tokens)
        lengths = steps(groups, self.request)
        for in_flight in (self.request.in_flight, DECODING):
            held = [g.blocks(lengths, in_flight=in_flight, dcp=self.request.dcp) for g in groups]
            claims = np.array(block.groups) @ np.array(held) * block.nbytes
            theirs = _claimed(self.theirs, self.request, lengths, in_flight)
            if (theirs / claims).min() < PROMISE:
                return False
        return True

    def _groups(self, tokens: int) -> list[Group]:
        return [kind.group(tokens) for kind in self.kinds]

    @cached_property
    def _longest(self) -> Numbers:
        return np.array([self.request.max_len])

    @cached_property
    def _few_lengths(self) -> Numbers:
        """Lengths that most blocks fail at which fail at all: where vLLM's blocks are full.

        The request's greatest is the last: padding is that of its claim.
        """
        greatest = self.request.max_len
        longest = max(greatest, LENGTHS)
        block = self.theirs.size.tokens if self.theirs else longest
        full = [block * n for n in (1, 2, 3, 4, 8, longest // block)]
        others = {min(max(n, 1), longest) for n in (block // 2, *full, longest)} - {greatest}
        return np.array([*sorted(others), greatest])

    @cached_property
    def _theirs(self) -> dict[int, Numbers]:
        """Bytes that vLLM's plan claims at those lengths, by the tokens in flight."""
        request, lengths = self.request, self._few_lengths
        if self.theirs is None:
            boundless = np.full(len(lengths), np.iinfo(np.int64).max)
            return dict.fromkeys((request.in_flight, DECODING), boundless)
        return {
            n: _claimed(self.theirs, request, lengths, n) for n in (request.in_flight, DECODING)
        }

    @cached_property
    def _useful(self) -> int:
        """Bytes that a request of the greatest length fills."""
        request, nbytes = self.request, 0
        for kind in self.kinds:
            blocks = kind.group(self.step).blocks(
                request.max_len, in_flight=request.in_flight, dcp=request.dcp
            )
            nbytes += blocks * kind.parts(1) * kind.nbytes(self.step, 1)
        return nbytes


def _claimed(draft: PlanDraft, request: PlanRequest, lengths: Numbers, in_flight: int) -> Numbers:
    """Bytes that a request of each length claims."""
    taken = blocks_taken(draft.groups, lengths, in_flight=in_flight, dcp=request.dcp)
    claimed: Numbers = np.sum([taken[i] * pool.width for i, pool in enumerate(draft.pools)], axis=0)
    return claimed
