"""`Hybrid`: a model with attention and recurrent layers, and `Yardstick`: vLLM's plan for it."""

from __future__ import annotations

from functools import cached_property
from math import lcm

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Layout
from kvatlas.geometry.integers import ceil_div
from kvatlas.planning.backends import Backend, smallest_common_block
from kvatlas.planning.block_size import (
    DEFAULT_BLOCK,
    BlockSize,
    checkpoint_multiple,
    kernel_multiple,
    used_backends,
)
from kvatlas.planning.capacity import Capacity, Share, capacity_of, least_share
from kvatlas.planning.grouping import alike
from kvatlas.planning.placing import PlanDraft, PoolDraft
from kvatlas.planning.plan_data import DECODING
from kvatlas.planning.policy_vllm import draft_vllm
from kvatlas.planning.request import PlanRequest
from kvatlas.planning.shared_blocks import SharedBlockSearch
from kvatlas.planning.sized_layers import SizedLayer
from kvatlas.planning.topology import check_vllm_topology


class Yardstick:
    """vLLM's plan for a `PlanRequest`: the reference for comparisons with other plans."""

    def __init__(self, request: PlanRequest, layers: list[SizedLayer] | None = None) -> None:
        self.request = request
        self.refusal: AtlasError | None = None
        self.draft: PlanDraft | None = None
        try:
            self.draft = draft_vllm(msgspec.structs.replace(request, layout=None), layers=layers)
        except AtlasError as refusal:
            self.refusal = refusal

    @cached_property
    def capacity(self) -> Capacity | None:
        """The capacity of vLLM's plan; None if vLLM has no plan or memory is too small for it."""
        try:
            return capacity_of(self.request, self.draft) if self.draft else None
        except AtlasError as refusal:
            if refusal.code is not Code.NOT_ENOUGH_MEMORY:
                raise
            return None

    def share(self, draft: PlanDraft) -> Share:
        """Return how many requests a draft fits, divided by the number that vLLM's plan fits.

        The result is the smallest ratio over all request lengths.
        """
        mine = capacity_of(self.request, draft)
        if self.capacity is None:
            return Share(1.0, self.request.max_len, DECODING)
        return least_share(mine, self.capacity, self.request)

    @property
    def block(self) -> int:
        """Block size of vLLM's plan in tokens; 0 if vLLM has no plan."""
        return self.draft.size.tokens if self.draft else 0

    @property
    def sentence(self) -> str:
        """A sentence about vLLM's block size, for the reasons of a plan."""
        if self.draft is None:
            code = self.refusal.code if self.refusal else ""
            return f"vLLM has no plan for this model, so there is nothing to compare with ({code})."
        try:
            check_vllm_topology(self.request.model, self.request.tp, self.request.dcp)
        except AtlasError as refusal:
            return (
                f"vLLM does not support this topology: {refusal.got}. If it did, its block size "
                f"would be {self.block:,} tokens."
            )
        return f"vLLM's block size is {self.block:,} tokens."


class Hybrid(msgspec.Struct, frozen=True, dict=True):
    """A model with both attention and recurrent layers, and the settings of its plan."""

    request: PlanRequest
    attention: list[SizedLayer]
    states: list[SizedLayer]
    rings: list[SizedLayer]
    layout: Layout
    orders: tuple[str, ...]
    size: BlockSize
    """The block size that kernels need, regardless of states."""

    @cached_property
    def theirs(self) -> Yardstick:
        """The plan of vLLM for the same request, for comparison."""
        return Yardstick(self.request)

    @cached_property
    def search(self) -> SharedBlockSearch:
        """The search for blocks that attention and states can share."""
        request = self.request
        step = request.block_size or smallest_common_block(self.backends, DEFAULT_BLOCK)
        step = lcm(step, checkpoint_multiple(request))
        layers, theirs = [*self.attention, *self.states, *self.rings], self.theirs.draft
        return SharedBlockSearch(request, layers, step=step, theirs=theirs)

    @property
    def backends(self) -> list[Backend]:
        """The backends of the attention layers, without duplicates."""
        return used_backends(self.request)

    @property
    def can_pack(self) -> bool:
        """Whether a page can hold either several attention layers or one recurrent state."""
        striped = not self.layout.page_contiguous and not self.layout.block_outermost
        uniform = alike(self.attention) and alike(self.states)
        return uniform and not self.rings and not (striped and self.attention[0].page.heads > 1)

    @property
    def most_packed(self) -> int:
        """The largest useful number of attention layers per page (`pack`).

        A larger pack would not make blocks smaller. The result may exceed the number of attention
        layers; the rest of the page is then padding.
        """
        smallest = self.packed_step * self.token
        return max(len(self.attention), ceil_div(self.largest_state, smallest))

    @property
    def packed_step(self) -> int:
        """Alignment of the block size of a packed plan, in tokens."""
        step = kernel_multiple(self.request, self.request.block_size or DEFAULT_BLOCK)
        return lcm(step, checkpoint_multiple(self.request))

    @property
    def largest_state(self) -> int:
        """Bytes of the largest recurrent state of a layer on one rank."""
        return max(layer.nbytes for layer in self.states)

    @property
    def token(self) -> int:
        """Bytes per token of one attention layer on one rank."""
        return self.attention[0].page.unpadded // self.attention[0].block

    def draft(self, pools: list[PoolDraft], tokens: int, *reasons: str) -> PlanDraft:
        """Return a draft with the given pools, a block size of `tokens`, and the reasons for it."""
        return PlanDraft(tuple(pools), BlockSize(tokens, reasons=reasons), self.orders)
