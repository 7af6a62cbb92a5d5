"""What a reader works with: a text model's config, and the dtypes decided around it.

A family's reader knows patterns and shapes. What it must not know is who asks:
which engine, which cache dtype the checkpoint wants, how the layers are called
inside a multimodal wrapper. That is here, once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from kvatlas.geometry import DType
from kvatlas.models.cache_dtypes import cached
from kvatlas.models.config import Config
from kvatlas.models.model import Layer
from kvatlas.specs import AnySpec, ChunkedAttention, FullAttention, SlidingAttention

Engine = Literal["vllm", "sglang"]
Kind = Literal["full", "sliding", "chunked"]


@dataclass(frozen=True, slots=True)
class Decoder:
    """A text model that is being read."""

    config: Config
    architecture: str
    dtype: str
    cache: str
    engine: Engine = "vllm"
    ssm: str | None = None
    conv: str | None = None
    layers: str = "model.layers"
    attention_name: str = "self_attn.attn"
    warnings: list[str] = field(default_factory=list)

    @property
    def depth(self) -> int:
        """Decoder layers."""
        return self.config.depth()

    @property
    def conv_dtype(self) -> str:
        """What a convolution's inputs are kept in: the model's dtype in every engine."""
        return self.conv or self.dtype

    def ssm_dtype(self, *, asked: str | None = None, vllm: str | None = None) -> str:
        """What a recurrent state is kept in.

        The caller's word goes first. SGLang then keeps fp32. vLLM keeps what the
        config `asked` for in the families where it listens, else the family's default,
        else the same as the convolution.
        """
        if self.ssm is not None:
            return self.ssm
        if self.engine == "sglang":
            return "fp32"
        if asked is not None and asked != "auto":
            return DType.of(asked).name
        return vllm or self.conv_dtype

    def layer(self, index: int, tail: str, spec: AnySpec) -> Layer:
        """A cache of decoder layer `index`, called `tail` inside it."""
        return Layer(name=f"{self.layers}.{index}.{tail}", index=index, spec=spec)

    def attention(
        self,
        kind: Kind = "full",
        *,
        heads: int | None = None,
        head_dim: int | None = None,
        v_dim: int | None = None,
        window: int | None = None,
        chunk: int | None = None,
    ) -> FullAttention | SlidingAttention | ChunkedAttention:
        """Attention of one kind, with the model's own sizes where none are given."""
        heads = heads or self.config.key_heads()
        head_dim = head_dim or self.config.head_dim()
        v_dim = None if v_dim == head_dim else v_dim
        spec: FullAttention | SlidingAttention | ChunkedAttention
        spec = FullAttention(heads=heads, head_dim=head_dim, v_dim=v_dim, dtype=self.dtype)
        if kind == "sliding":
            window = window or self.config.count("sliding_window")
            spec = SlidingAttention(window=window, **_fields(spec))
        elif kind == "chunked":
            chunk = chunk or self.config.count("attention_chunk_size")
            spec = ChunkedAttention(chunk=chunk, **_fields(spec))
        return cached(spec, self.cache)


def _fields(spec: FullAttention) -> dict[str, Any]:
    return msgspec.structs.asdict(spec)
