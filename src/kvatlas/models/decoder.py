"""What a reader works with: a text model's config, and the dtypes decided around it.

A family's reader knows patterns and shapes. What it must not know is who asks:
which engine, which cache dtype the checkpoint wants, how the layers are called
inside a multimodal wrapper. That is here, once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from kvatlas.geometry import DType
from kvatlas.models.cache_dtypes import cached
from kvatlas.models.config import Config
from kvatlas.models.layer import Layer
from kvatlas.specs import AnySpec, ChunkedAttention, FullAttention, SlidingAttention

Engine = Literal["vllm", "sglang"]
Kind = Literal["full", "sliding", "chunked"]


class StateDtypes(NamedTuple):
    """Who decides what recurrent states are kept in: the engine, unless the caller does."""

    engine: Engine = "vllm"
    ssm: str | None = None
    conv: str | None = None


@dataclass(frozen=True, slots=True)
class Decoder:
    """A text model that is being read.

    >>> sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    >>> decoder = Decoder(Config(sizes), dtype="bf16", cache="auto", states=StateDtypes())
    >>> [layer.name for layer in decoder.every_layer(decoder.attention())]
    ['model.layers.0.self_attn.attn', 'model.layers.1.self_attn.attn']
    """

    config: Config
    dtype: str
    cache: str
    states: StateDtypes
    layers: str = "model.layers"
    attention_name: str = "self_attn.attn"

    @property
    def depth(self) -> int:
        """Decoder layers."""
        return self.config.depth()

    @property
    def conv_dtype(self) -> str:
        """What a convolution's inputs are kept in: the model's dtype in every engine."""
        return self.states.conv or self.dtype

    def ssm_dtype(self, *, config: str | None = None, default: str | None = None) -> str:
        """What a recurrent state is kept in.

        The caller's word goes first. SGLang then keeps fp32. vLLM keeps what the `config`
        says in the families where it reads that, else the family's `default`, else the
        same as the convolution.
        """
        if self.states.ssm is not None:
            return self.states.ssm
        if self.states.engine == "sglang":
            return "fp32"
        if config is not None and config != "auto":
            return DType.of(config).name
        return default or self.conv_dtype

    def layer(self, index: int, spec: AnySpec, name: str | None = None) -> Layer:
        """A cache of decoder layer `index`, called `name` inside it: attention's if none."""
        full_name = f"{self.layers}.{index}.{name or self.attention_name}"
        return Layer(name=full_name, index=index, spec=spec)

    def every_layer(self, spec: AnySpec, name: str | None = None) -> Iterator[Layer]:
        """The same cache in all decoder layers."""
        return (self.layer(index, spec, name) for index in range(self.depth))

    def attention(
        self,
        kind: Kind = "full",
        *,
        heads: int | None = None,
        head_dim: int | None = None,
        v_dim: int | None = None,
        window: int | None = None,
    ) -> FullAttention | SlidingAttention | ChunkedAttention:
        """Attention of one kind, with the model's own sizes where none are given."""
        head_dim = head_dim or self.config.head_dim()
        sizes: dict[str, Any] = {
            "heads": heads or self.config.key_heads(),
            "head_dim": head_dim,
            "v_dim": None if v_dim == head_dim else v_dim,
            "dtype": self.dtype,
        }
        if kind == "sliding":
            window = window or self.config.count("sliding_window")
            return cached(SlidingAttention(window=window, **sizes), self.cache)
        if kind == "chunked":
            chunk = self.config.count("attention_chunk_size")
            return cached(ChunkedAttention(chunk=chunk, **sizes), self.cache)
        return cached(FullAttention(**sizes), self.cache)
