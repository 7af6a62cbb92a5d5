"""`Decoder`: the input of the functions that read the configs of a model family.

A `Decoder` combines a text model's config with values that do not depend on the family. The dtypes
depend on the engine and the checkpoint, and the prefixes of layer names depend on the multimodal
wrapper. The readers only determine patterns and shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from kvatlas.geometry import DType
from kvatlas.models.cache_dtypes import cached
from kvatlas.models.config import Config
from kvatlas.models.layer import Layer
from kvatlas.specs import AnySpec, ChunkedAttention, FullAttention, SlidingAttention

Engine = Literal["vllm", "sglang"]
Kind = Literal["full", "sliding", "chunked"]


class StateDtypes(NamedTuple):
    """The dtypes of recurrent states; None selects the default dtype of `engine`."""

    engine: Engine = "vllm"
    ssm: str | None = None
    conv: str | None = None


class Decoder(msgspec.Struct, frozen=True):
    """A text model's config, dtypes and layer names.

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
        """The number of decoder layers."""
        return self.config.depth()

    @property
    def conv_dtype(self) -> str:
        """The dtype of cached convolution inputs; every engine defaults to the model's dtype."""
        return self.states.conv or self.dtype

    def ssm_dtype(self, *, config: str | None = None, default: str | None = None) -> str:
        """Return the dtype of recurrent states.

        A dtype given by the caller takes precedence. Otherwise SGLang uses fp32, and vLLM uses the
        first of these that is set: `config`, the family's `default`, the convolution's dtype.
        `config` is the value in the model's config, for families where vLLM reads it.
        """
        if self.states.ssm is not None:
            return self.states.ssm
        if self.states.engine == "sglang":
            return "fp32"
        if config is not None and config != "auto":
            return DType.of(config).name
        return default or self.conv_dtype

    def layer(self, index: int, spec: AnySpec, name: str | None = None) -> Layer:
        """Return the `Layer` that describes one cache of decoder layer `index`.

        `name` is the cache's name within the layer, by default the name of the layer's attention.
        """
        full_name = f"{self.layers}.{index}.{name or self.attention_name}"
        return Layer(name=full_name, index=index, spec=spec)

    def every_layer(self, spec: AnySpec, name: str | None = None) -> Iterator[Layer]:
        """Yield one `Layer` with spec `spec` for every decoder layer."""
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
        """Return the spec of one kind of attention; sizes default to the config's."""
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
