"""`SizedLayer`: a layer at a given block size on one rank, the input of grouping and placing.

A `SizedLayer` has the layer's page, its padding and the requirements of its backend. Two layers
have the same `key` if they can share a block table and a region of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from math import gcd
from typing import Any, Literal

import msgspec
from msgspec.structs import force_setattr, replace

from kvatlas.geometry import Page, Sharding
from kvatlas.geometry.integers import round_up
from kvatlas.models import Layer
from kvatlas.planning.backends import Backend
from kvatlas.planning.request import PlanRequest
from kvatlas.specs import (
    Attention,
    ChunkedAttention,
    CompressorState,
    CrossAttention,
    Indexer,
    LatentAttention,
    Recurrent,
    Ring,
    SinkAttention,
    SlidingAttention,
    SlidingLatentAttention,
    Spec,
)

Kind = Literal[
    "full_attention",
    "sliding_window",
    "chunked_local_attention",
    "sink_full_attention",
    "cross_attention",
    "mla_attention",
    "sliding_window_mla",
    "recurrent",
    "ring",
]

FULL_KINDS: tuple[Kind, ...] = ("full_attention", "mla_attention", "sink_full_attention")
SLIDING_KINDS = ("sliding_window", "sliding_window_mla")
LOCAL_KINDS = (*SLIDING_KINDS, "chunked_local_attention")
FIXED_KINDS = ("recurrent", "ring")
"""Kinds of which a request of any length holds the same number of blocks."""

_WINDOW_BLOCK = 64
"""DeepSeek-V4's sliding window uses blocks of 64 tokens, regardless of the other layers."""


@lru_cache(maxsize=4096)
def page_of(spec: Spec, block: int, tp: int, rank: int = 0, padded: int | None = None) -> Page:
    """Return `spec.page(...)`, padded to `padded` bytes if given.

    Pages are cached, because plans request the same pages repeatedly.
    """
    if padded is not None:
        return page_of(spec, block, tp, rank).padded(padded)
    if block > 1 and isinstance(spec, Recurrent | Ring):
        return page_of(spec, 1, tp, rank)  # the page is the same for every block
    return spec.page(block, tp=tp, rank=rank)


@lru_cache(maxsize=4096)
def heads_on_rank(heads: int, tp: int) -> int:
    """Return the number of heads on each rank, if `tp` ranks divide `heads` heads."""
    return Sharding.by_heads(heads).size(tp)


@lru_cache(maxsize=4096)
def _alike(spec: Spec, tp: int) -> tuple[Any, ...]:
    """Return a key that is equal for specs whose layers can share a region.

    Engines compare the heads on one rank: at tp 8, layers with 8 and with 4 KV heads are equal.
    """
    if not isinstance(spec, Attention):
        return (spec,)
    fields = msgspec.structs.asdict(spec)
    fields["heads"] = heads_on_rank(spec.heads, tp)
    return (type(spec), *fields.items())


class SizedLayer(msgspec.Struct, frozen=True):
    """A layer at a given block size, on one of `tp` ranks."""

    layer: Layer
    kind: Kind
    block: int
    tp: int
    padded: int | None
    """The size in bytes to which the page is padded; None without padding."""
    backend: Backend | None
    leader: bool = False
    """Whether the layer is latent attention with an indexer; engines group these separately."""
    checkpoints: int = 0
    """Number of additional blocks that a recurrent layer holds for prefix caching."""
    splits: int = 1
    """Number of parts into which a state is split by heads; each has a separate page."""
    part: int = 0
    """The index of the part that this object describes; 0 if the state is not split."""
    page: Page = None  # type: ignore[assignment]
    """The page, including padding. It is computed, like its size."""
    nbytes: int = 0
    """Bytes of the page."""

    def __post_init__(self) -> None:
        # A part has the same size as a whole state would have with tp x `splits` ranks.
        page = page_of(self.layer.spec, self.block, self.tp * self.splits, 0, self.padded)
        force_setattr(self, "page", page)
        force_setattr(self, "nbytes", page.nbytes)

    def cut(self, block: int, splits: int = 1, part: int = 0) -> SizedLayer:
        """Return the layer with blocks of `block` tokens.

        If `splits` is greater than 1, the recurrent state is split into `splits` parts, and the
        result has only part `part`.
        """
        return SizedLayer(
            self.layer,
            self.kind,
            block,
            self.tp,
            self.padded,
            self.backend,
            self.leader,
            self.checkpoints,
            splits,
            part,
        )

    def with_spec(self, spec: Spec) -> SizedLayer:
        """Return the layer with another spec. The size of the page must not change."""
        if spec is self.spec:
            return self
        return replace(self, layer=replace(self.layer, spec=spec))

    @property
    def name(self) -> str:
        """The layer's name."""
        return self.layer.name

    @property
    def spec(self) -> Spec:
        """The layer's spec."""
        return self.layer.spec

    @property
    def alignment(self) -> int:
        """Alignment of the block stride, in bytes."""
        if self.apart is None:
            return 1
        unit, size = self.apart
        if unit == "rows":
            return size
        kernel = gcd(size, self.block)
        return 1 if kernel == self.block else page_of(self.spec, kernel, self.tp).nbytes

    @property
    def spread(self) -> int:
        """Bytes of the page, rounded up to a multiple of `alignment`."""
        return round_up(self.nbytes, self.alignment)

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that is equal for layers that can share a block table and a region."""
        spec = _alike(self.spec, self.tp)
        return (self.kind, spec, self.block, self.padded, self.apart, self.leader)

    @property
    def apart(self) -> tuple[str, int] | None:
        """The condition that the layer's backend places on the block stride; None if there is none.

        ("rows", n) means that the stride must be a multiple of n bytes. ("kernel blocks", n) means
        that the stride must be a multiple of the bytes of n tokens.
        """
        if self.backend is None:
            return None
        if self.backend.stride_bytes:
            return ("rows", self.backend.stride_bytes)
        if self.backend.stride_tokens:
            return ("kernel blocks", self.backend.stride_tokens)
        if isinstance(self.spec, Ring) and self.backend.whole_rows:
            return ("rows", self.spec.row_bytes)
        if self.backend.whole_rows and getattr(self.spec, "cache", "auto") == "auto":
            return ("rows", self.page.content)
        if not self.backend.whole_blocks:
            return None
        if self.backend.whole_rows or not self.backend.multiples:
            return ("kernel blocks", max(self.backend.sizes))
        return None


def kind_of(spec: Spec) -> Kind:
    """Return the kind of a layer's cache, under the name that engines use."""
    return _kind_of_class(type(spec))


@cache
def _kind_of_class(spec: type[Spec]) -> Kind:
    if issubclass(spec, Recurrent):
        return "recurrent"
    if issubclass(spec, Ring):
        return "ring"
    if issubclass(spec, SlidingLatentAttention | CompressorState):
        return "sliding_window_mla"
    if issubclass(spec, LatentAttention | Indexer):
        return "mla_attention"
    if issubclass(spec, SlidingAttention):
        return "sliding_window"
    if issubclass(spec, ChunkedAttention):
        return "chunked_local_attention"
    if issubclass(spec, SinkAttention):
        return "sink_full_attention"
    return "cross_attention" if issubclass(spec, CrossAttention) else "full_attention"


def checkpoints(spec: Spec, request: PlanRequest) -> int:
    """Return how many additional blocks of a recurrent layer a request holds for prefix caching.

    A new state is written to a new block while the old state is kept. Some kernels also save a
    state in the middle of a prefill.
    """
    if not request.prefix_caching or kind_of(spec) != "recurrent":
        return 0
    return 1 + (spec in request.checkpoints)


def own_block(spec: Spec, backend: Backend | None, block: int) -> int:
    """Return the block size that a layer uses in a model with block size `block`.

    DeepSeek-V4's small caches have fixed block sizes. A sliding window uses the largest block
    that its kernel reads without splitting.
    """
    if isinstance(spec, SlidingLatentAttention):
        return (backend and backend.window_block) or _WINDOW_BLOCK
    if isinstance(spec, CompressorState):
        return 4 if spec.window <= 8 else 8
    if isinstance(spec, Ring) and not spec.fills_page:
        return spec.rows
    if isinstance(spec, SlidingAttention) and backend and not backend.reads(block):
        if backend.multiples:
            base = min(backend.sizes)
            return max(base, block // base * base)
        return max((size for size in backend.sizes if size <= block), default=min(backend.sizes))
    return block


def _with_whole_rings(request: PlanRequest, block: int) -> Iterator[Layer]:
    """Yield the model's layers.

    A ring that engines enlarge gets as many rows as fit in an attention page.
    """
    layers = request.model.layers
    if not any(isinstance(layer.spec, Ring) and layer.spec.fills_page for layer in layers):
        yield from layers
        return
    pages = {
        layer.index: page_of(layer.spec, block, request.tp).unpadded
        for layer in layers
        if isinstance(layer.spec, Attention)
    }
    for layer in layers:
        if isinstance(layer.spec, Ring) and layer.spec.fills_page:
            yield replace(layer, spec=layer.spec.enlarged(pages[layer.index]))
        else:
            yield layer


def size_layers(
    request: PlanRequest, *, block: int, state_padding: int | None = None
) -> list[SizedLayer]:
    """Return all layers with blocks of `block` tokens, in the order in which engines list them.

    Pages of recurrent states are padded to `state_padding` bytes if it is given.
    """
    indexed = {layer.index for layer in request.model.layers if isinstance(layer.spec, Indexer)}
    sized = []
    for layer in _with_whole_rings(request, block):
        spec, backend = layer.spec, request.backends[layer.name]
        kind = kind_of(spec)
        tokens, padded = own_block(spec, backend, block), None
        if kind == "recurrent":
            padded = state_padding
            if not request.prefix_caching:
                tokens = (
                    request.max_len
                )  # one block per request, because only the last state is kept
        page = page_of(spec, tokens, request.tp)
        leads = type(spec) is LatentAttention and spec.compress == 1 and layer.index in indexed
        sized.append(
            SizedLayer(
                layer=layer,
                kind=kind,
                block=tokens,
                tp=request.tp,
                padded=page.nbytes if page.padding else padded,
                backend=backend,
                leader=leads,
                checkpoints=checkpoints(spec, request),
            )
        )
    return sized
