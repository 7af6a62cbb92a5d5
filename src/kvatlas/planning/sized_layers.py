"""What each layer wants of a plan: the numbers that grouping and sizing work with.

A `Want` is a layer at a block size on one rank: how large its page is, how it may
be padded, and how many blocks a request takes of it. Two wants are alike when one
block table and one region of memory can serve both.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import gcd
from typing import Any, Literal

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Page, Sharding, ceil_div, round_up
from kvatlas.models import Layer, Model
from kvatlas.planning.backends import Backend
from kvatlas.specs import (
    Attention,
    ChunkedAttention,
    CompressorState,
    CrossAttention,
    Indexer,
    LatentAttention,
    Mamba2,
    Recurrent,
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
]

FULL_KINDS = ("full_attention", "mla_attention", "sink_full_attention")
SLIDING_KINDS = ("sliding_window", "sliding_window_mla")

_WINDOW_BLOCK = 64
"""DeepSeek-V4 keeps its sliding window in blocks of 64, whatever the others use."""


@lru_cache(maxsize=4096)
def page_of(spec: Spec, block: int, tp: int, rank: int = 0, padded: int | None = None) -> Page:
    """`spec.page`, remembered: layers share specs, and plans ask again and again."""
    if padded is not None:
        return page_of(spec, block, tp, rank).padded(padded)
    return spec.page(block, tp=tp, rank=rank)


@lru_cache(maxsize=4096)
def _alike(spec: Spec, tp: int) -> tuple[Any, ...]:
    """What of a spec decides whether two layers can share a region, on a rank of `tp`.

    Engines compare what a rank holds: 8 and 4 kv heads are alike at tp 8.
    """
    if not isinstance(spec, Attention):
        return (spec,)
    fields = msgspec.structs.asdict(spec)
    fields["heads"] = Sharding.by_heads(spec.heads).size(tp)
    return (type(spec), *fields.items())


@dataclass(frozen=True, slots=True)
class Want:
    """A layer at a block size, on one rank of `tp`."""

    layer: Layer
    kind: Kind
    block: int
    tp: int
    padded: int | None
    """Bytes that the page is padded to, where something asks for it."""
    backend: Backend | None
    leader: bool = False
    """Latent attention with an indexer of its own: engines keep such layers apart."""
    window: int | None = None
    """Tokens that stay within reach; for a chunk, its length."""
    checkpoints: int = 0
    """Further blocks that a recurrent layer keeps while it saves prefixes."""
    splits: int = 1
    """Parts that a state is cut into by heads, each with a page of its own."""
    part: int = 0
    """Which of them this is."""
    page: Page = field(init=False, compare=False)
    """Its page, with what padding it asks for."""
    nbytes: int = field(init=False, compare=False)
    """Bytes of its page."""

    def __post_init__(self) -> None:
        # A part of a rank's state is what one of `cut` times as many ranks would hold, and
        # all of them hold equally much.
        page = page_of(self.layer.spec, self.block, self.tp * self.splits, 0, self.padded)
        object.__setattr__(self, "page", page)
        object.__setattr__(self, "nbytes", page.nbytes)

    @property
    def alignment(self) -> int:
        """Bytes that the distance between blocks must be a multiple of."""
        if self.apart is None:
            return 1
        unit, size = self.apart
        if unit == "rows":
            return size
        kernel = gcd(size, self.block)
        return 1 if kernel == self.block else page_of(self.layer.spec, kernel, self.tp).nbytes

    @property
    def spread(self) -> int:
        """Its page rounded up to that alignment."""
        return round_up(self.nbytes, self.alignment)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for layers that one block table and one region can serve."""
        spec = _alike(self.layer.spec, self.tp)
        return (self.kind, spec, self.block, self.padded, self.apart, self.leader)

    @property
    def apart(self) -> tuple[str, int] | None:
        """What its backend asks of the distance between blocks, as engines compare it."""
        if self.backend is None:
            return None
        if self.backend.whole_rows and getattr(self.layer.spec, "cache", "auto") == "auto":
            return ("rows", self.page.content)
        if self.backend.whole_rows or not self.backend.multiples:
            return ("kernel blocks", max(self.backend.sizes))
        return None

    def with_block(self, block: int) -> Want:
        """The same layer with blocks of `block` tokens."""
        return replace(self, block=block)

    def blocks(self, length: int, in_flight: int, dcp: int, *, block: int | None = None) -> int:
        """Blocks that a request of `length` tokens holds at most, while it is computed.

        `block` asks about blocks of another size than its own.
        """
        if dcp > 1 and self.kind not in (*FULL_KINDS, "recurrent", "cross_attention"):
            raise AtlasError(
                Code.BAD_TOPOLOGY,
                "Decode context parallelism divides attention over all tokens",
                got=f"dcp {dcp} with {self.kind} in {self.layer.name}",
                hint="Use dcp 1 for models with windows or chunks",
            )
        spec = self.layer.spec
        return blocks_held(
            self.kind,
            block or self.block,
            length,
            in_flight=in_flight,
            dcp=dcp,
            window=self.window,
            held=1 + self.checkpoints,
            source=spec.source if isinstance(spec, CrossAttention) else 0,
        )


def blocks_held(
    kind: Kind,
    block: int,
    length: int,
    *,
    in_flight: int,
    dcp: int,
    window: int | None,
    held: int,
    source: int,
) -> int:
    """Blocks that a request of `length` tokens holds at most of a group.

    A window must also cover the tokens that are scheduled but not settled.
    """
    if kind == "recurrent":
        return held
    if kind == "cross_attention":
        return ceil_div(source, block)
    if kind in FULL_KINDS:
        return ceil_div(ceil_div(length, dcp), block)
    reach = window or length
    if kind == "chunked_local_attention":
        return ceil_div(min(reach + in_flight, length), block)
    # A window may start in the middle of a block: one more.
    return ceil_div(min(reach - 1 + in_flight, length), block) + 1


def kind_of(spec: Spec) -> Kind:
    """What engines call a layer's cache."""
    if isinstance(spec, Recurrent):
        return "recurrent"
    if isinstance(spec, SlidingLatentAttention | CompressorState):
        return "sliding_window_mla"
    if isinstance(spec, LatentAttention | Indexer):
        return "mla_attention"
    if isinstance(spec, SlidingAttention):
        return "sliding_window"
    if isinstance(spec, ChunkedAttention):
        return "chunked_local_attention"
    if isinstance(spec, SinkAttention):
        return "sink_full_attention"
    return "cross_attention" if isinstance(spec, CrossAttention) else "full_attention"


def own_block(spec: Spec, backend: Backend | None, block: int) -> int:
    """The block that a layer uses when the model's is `block`.

    DeepSeek-V4's small caches have fixed blocks, and a sliding window takes the
    largest block that its kernel reads, rather than have it split.
    """
    if isinstance(spec, SlidingLatentAttention):
        return _WINDOW_BLOCK
    if isinstance(spec, CompressorState):
        return 4 if spec.window <= 8 else 8
    if isinstance(spec, SlidingAttention) and backend and not backend.reads(block):
        if backend.multiples:
            base = min(backend.sizes)
            return max(base, block // base * base)
        return max((size for size in backend.sizes if size <= block), default=min(backend.sizes))
    return block


def wants_of(
    model: Model,
    backends: dict[str, Backend | None],
    *,
    block: int,
    tp: int,
    state_padding: int | None,
    prefix_caching: bool,
    max_len: int,
) -> list[Want]:
    """What every layer wants, in the order in which an engine registers them."""
    indexed = {layer.index for layer in model.layers if isinstance(layer.spec, Indexer)}
    found = []
    for layer in model.layers:
        spec, backend = layer.spec, backends[layer.name]
        kind = kind_of(spec)
        size = own_block(spec, backend, block)
        if kind == "recurrent" and not prefix_caching:
            size = max_len  # one state, never saved on the way
        page = page_of(spec, size, tp)
        padded = state_padding if kind == "recurrent" else None
        if page.padding:
            padded = page.nbytes
        # While prefixes are saved, a state is written to a new block and the old one kept;
        # Mamba-2 also saves one in the middle of a prefill.
        checkpoints = (1 + isinstance(spec, Mamba2)) if prefix_caching else 0
        found.append(
            Want(
                layer=layer,
                kind=kind,
                block=size,
                tp=tp,
                padded=padded,
                backend=backend,
                leader=type(spec) is LatentAttention
                and spec.compress == 1
                and layer.index in indexed,
                window=getattr(spec, "window", getattr(spec, "chunk", None)),
                checkpoints=checkpoints if kind == "recurrent" else 0,
            )
        )
    return found
