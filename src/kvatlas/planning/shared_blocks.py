"""Search for the smallest block that attention and recurrent states of a hybrid can share.

A block id belongs to one group at a time. Therefore a block holds one of three things: pages of
attention layers, recurrent states, or parts of states that are split by heads. The tokens and
bytes of a block determine how many layers of each kind it holds, and thus the number of groups.
Each group has a block table. The search starts at the smallest block and yields the blocks that
keep the promise of policy atlas (see `capacity`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError
from kvatlas.geometry.integers import Whole
from kvatlas.planning.block_size import used_backends
from kvatlas.planning.capacity import PROMISE, longest_promised, steps
from kvatlas.planning.grouping import GroupDraft, dealt, kinds_of
from kvatlas.planning.placing import PlanDraft
from kvatlas.planning.plan_data import DECODING
from kvatlas.planning.plan_parts import Group, blocks_taken
from kvatlas.planning.request import PlanRequest
from kvatlas.planning.sized_layers import FIXED_KINDS, SizedLayer, page_of

_SPLITS = (1, 2, 4, 8)
"""Numbers of parts into which a state may be split; each part needs a separate kernel call."""
_WHOLE = (1,)
"""The same for vLLM, whose kernels do not support split states."""
_MOST_SIZES = 1024
"""Limit on the block sizes to try; real models need at most a few hundred."""
_BATCH = 16
MOST_TABLES = 64
"""Limit on the block tables per request."""
_ALIGNMENT = 128
"""Alignment of blocks in bytes, which kernels prefer."""

Numbers = NDArray[np.int64]


class SharedBlock(msgspec.Struct, frozen=True):
    """A block that holds either attention layers, or states, or parts of states."""

    tokens: int
    nbytes: int
    splits: int
    """Number of parts into which a state is split by heads."""
    groups: tuple[int, ...]
    """The number of groups of each kind of layer; each group has a block table."""
    padding: float
    """Padding as a fraction of the bytes that a request of `max_len` tokens takes."""

    @property
    def preference(self) -> tuple[float, ...]:
        """Sort key; the smallest is the best.

        Compares the block size, then the padding rounded to a percent, then the number of parts
        per state, then the number of block tables.
        """
        return (self.tokens, round(self.padding, 2), self.splits, sum(self.groups))


class LayerKind(msgspec.Struct, frozen=True, dict=True):
    """Layers that can share a block table and a kind of page."""

    layers: Sequence[SizedLayer]

    @property
    def recurrent(self) -> bool:
        """Whether the layers are recurrent."""
        return self.layers[0].kind == "recurrent"

    @property
    def fixed(self) -> bool:
        """Whether the layers are recurrent or rings, whose pages have a fixed size."""
        return self.layers[0].kind in FIXED_KINDS

    def parts(self, splits: int) -> int:
        """Return the total number of pages of the layers if each state has `splits` parts."""
        return len(self.layers) * (splits if self.recurrent else 1)

    def nbytes(self, tokens: Whole, splits: int) -> Whole:
        """Return the bytes of a page: `tokens` tokens of attention, one part of a state, or a ring.

        States are split into `splits` parts. Returns 0 if the heads cannot be divided into `splits`
        parts.
        """
        first = self.layers[0]
        if not self.fixed:
            return tokens * (first.page.unpadded // first.block)
        parts = splits if self.recurrent else 1
        try:
            return tokens * 0 + page_of(first.spec, first.block, first.tp * parts).nbytes
        except AtlasError:
            return tokens * 0

    @cached_property
    def held(self) -> int:
        """Number of blocks per group that a request holds if the layers are `fixed`."""
        return 1 + max(layer.checkpoints for layer in self.layers)

    def group(self, tokens: int) -> Group:
        """Return a group of these layers with blocks of `tokens` tokens."""
        first = self.layers[0]
        return Group.of(first.kind, first.spec, block=self._block(tokens), pool=0, held=self.held)

    def _block(self, tokens: int) -> int:
        """Return the block size of these layers in a plan with blocks of `tokens` tokens."""
        return self.layers[0].block if self.fixed and not self.recurrent else tokens

    def dealt(self, tokens: int, splits: int, groups: int) -> list[GroupDraft]:
        """Distribute the pages of all layers over `groups` groups.

        States are split into `splits` parts, each with a separate page.
        """
        cuts = splits if self.recurrent else 1
        block = self._block(tokens)
        sized = [layer.cut(block, cuts, part) for layer in self.layers for part in range(cuts)]
        return dealt(sized, groups)


class SharedBlockSearch:
    """A search for small blocks that fit at least `PROMISE` of the requests of vLLM's plan.

    If vLLM has no plan, the search finds the blocks with the least padding instead.
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
        """Block sizes tried so far, in tokens, at which a block can hold every kind of layer."""

    def blocks(self, largest: int) -> Iterator[SharedBlock]:
        """Yield suitable blocks of up to `largest` tokens, ordered by their `preference`."""
        sizes = self._sizes(largest)
        if self.theirs is None:
            found = list(self._tried(sizes))
            least = min((round(block.padding, 2) for block in found), default=0.0)
            tight = [block for block in found if round(block.padding, 2) == least]
            yield from sorted(tight, key=lambda block: block.preference)
            return
        # Trying sizes one by one would be slow. Trying all would be wasteful, because a small
        # size is often good enough.
        for batch in np.split(sizes, range(_BATCH, len(sizes), _BATCH)):
            for block in sorted(self._tried(batch), key=lambda block: block.preference):
                if self._keeps_promise(block):
                    yield block

    def _sizes(self, largest: int) -> Numbers:
        """Return the block sizes to try, in tokens.

        vLLM does not split packed blocks, so a plan for vLLM has blocks that its kernels read.
        """
        sizes = np.arange(self.step, largest + 1, self.step)
        if self.request.runs_on:
            used = used_backends(self.request)
            sizes = sizes[[all(b.reads(int(n)) for b in used) for n in sizes]]
        return sizes[:_MOST_SIZES]

    def groups_of(self, block: SharedBlock) -> tuple[GroupDraft, ...]:
        """Divide the layers into groups, each of which fits in a block like `block`."""
        return tuple(
            group
            for kind, count in zip(self.kinds, block.groups, strict=True)
            for group in kind.dealt(block.tokens, block.splits, count)
        )

    def preference(self, draft: PlanDraft) -> tuple[float, ...]:
        """Return the sort key of a draft, for comparison with `SharedBlock.preference`."""
        claimed = int(_claimed(draft, self.request, self._longest, self.request.in_flight)[0])
        return (draft.size.tokens, round(1 - self._useful / claimed, 2), 1, len(draft.groups))

    def _tried(self, tokens: Numbers) -> Iterator[SharedBlock]:
        """Yield blocks that keep the promise of policy atlas at a few sampled request lengths.

        `tokens` contains the block sizes to try.
        """
        held = {n: self._held(tokens, n) for n in (DECODING, self.request.in_flight)}
        for splits in _WHOLE if self.request.runs_on else _SPLITS:
            at, counts, nbytes = self._ways_to_deal(tokens, splits)
            self.tried |= set(tokens[at].tolist())
            # Most blocks already fail at `max_len`, where attention dominates.
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
        """Return how many blocks a request takes in a group.

        The result is an array [block size, kind of layer, request length]. `tokens` contains the
        block sizes. `_few_lengths` returns the request lengths.
        """
        lengths, dcp = self._few_lengths, self.request.dcp
        held = np.empty((len(tokens), len(self.kinds), len(lengths)), dtype=np.int64)
        for k, kind in enumerate(self.kinds):
            if kind.fixed:
                held[:, k] = kind.held
                continue
            for i, size in enumerate(tokens.tolist()):
                held[i, k] = kind.group(size).blocks(lengths, in_flight=in_flight, dcp=dcp)
        return held

    def _ways_to_deal(self, tokens: Numbers, splits: int) -> tuple[Numbers, Numbers, Numbers]:
        """Return all possible blocks as three arrays with one row per block.

        The first array contains the index of the block size in `tokens`. The second contains the
        number of groups of each kind of layer. The third contains the bytes of the block. Each
        state is split into `splits` parts.
        """
        parts = np.array([kind.parts(splits) for kind in self.kinds])
        sizes = np.stack([kind.nbytes(tokens, splits) for kind in self.kinds], axis=1)
        if not sizes.all():
            sizes, tokens = sizes[:0], tokens[:0]
        filled = [sizes[:, [k]] * np.arange(1, n + 1) for k, n in enumerate(parts)]
        fits = np.minimum(np.concatenate(filled, axis=1)[:, :, None] // sizes[:, None], parts)
        counts = -(-parts // np.maximum(fits, 1))
        sound = (fits > 0).all(axis=2) & (counts.sum(axis=2) <= MOST_TABLES)
        at, counts = np.nonzero(sound)[0], counts[sound]
        # Layers are distributed evenly, and the fullest group determines the bytes of a block.
        nbytes = (-(-parts // counts) * sizes[at]).max(axis=1)
        aligned = nbytes % _ALIGNMENT == 0
        return at[aligned], counts[aligned], nbytes[aligned]

    def _keeps_promise(self, block: SharedBlock) -> bool:
        """Return whether a block keeps the promise of policy atlas at every request length."""
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
        """A few request lengths at which bad blocks are most likely to break the promise.

        Most of them fill vLLM's blocks exactly. The last length is `max_len`, at which padding
        is measured.
        """
        greatest = self.request.max_len
        longest = longest_promised(self.request)
        block = self.theirs.size.tokens if self.theirs else longest
        full = [block * n for n in (1, 2, 3, 4, 8, longest // block)]
        others = {min(max(n, 1), longest) for n in (block // 2, *full, longest)} - {greatest}
        return np.array([*sorted(others), greatest])

    @cached_property
    def _theirs(self) -> dict[int, Numbers]:
        """The bytes that requests take in vLLM's plan.

        The keys are numbers of tokens in flight. Each value is an array with one element per
        request length in `_few_lengths`.
        """
        request, lengths = self.request, self._few_lengths
        if self.theirs is None:
            boundless = np.full(len(lengths), np.iinfo(np.int64).max)
            return dict.fromkeys((request.in_flight, DECODING), boundless)
        return {
            n: _claimed(self.theirs, request, lengths, n) for n in (request.in_flight, DECODING)
        }

    @cached_property
    def _useful(self) -> int:
        """Bytes that a request of `max_len` tokens uses, without padding."""
        request, nbytes = self.request, 0
        for kind in self.kinds:
            blocks = kind.group(self.step).blocks(
                request.max_len, in_flight=request.in_flight, dcp=request.dcp
            )
            nbytes += blocks * kind.parts(1) * kind.nbytes(self.step, 1)
        return nbytes


def _claimed(draft: PlanDraft, request: PlanRequest, lengths: Numbers, in_flight: int) -> Numbers:
    """Return how many bytes a request takes in a draft's plan, for each length in `lengths`."""
    taken = blocks_taken(draft.groups, lengths, in_flight=in_flight, dcp=request.dcp)
    claimed: Numbers = np.sum([taken[i] * pool.width for i, pool in enumerate(draft.pools)], axis=0)
    return claimed
