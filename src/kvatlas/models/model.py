"""`Model`: what a whole model caches, layer by layer, without a word about memory.

A model is a name, a few numbers that topologies must respect, and one `Layer` for
each cache that it keeps. A decoder layer may keep several caches (attention and an
indexer, attention and Mamba side by side) or none (an MLP, a layer that shares
another's cache), so layers are named by their cache, as engines name them.

`Model.load` goes one way, whatever it is given: find the config, the text model in it,
and its family; the family's reader lists the caches.
"""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from msgspec.structs import replace

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import DType
from kvatlas.models.architectures import PREFIXES, find_family, plain_family, with_defaults
from kvatlas.models.cache_dtypes import cached, check_cache, checkpoint_cache
from kvatlas.models.config import QUERY_HEADS, Config, bad
from kvatlas.models.decoder import Decoder, Engine, StateDtypes
from kvatlas.models.layer import Layer
from kvatlas.models.sources import Source, find_config
from kvatlas.specs import Indexer

_TEXT = ("text_config", "llm_config", "language_config", "thinker_config", "language_model_config")
_LENGTHS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length",
    "max_target_positions", "max_sequence_length",
)  # fmt: skip
_BY_ENGINE = StateDtypes()


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a model caches.

    `layers` are in the order in which an engine registers them.

    >>> model = Model.load("gpt-oss-20b")
    >>> model.layers[0].name, model.layers[0].spec.window
    ('model.layers.0.attn.attn', 128)
    """

    name: str
    architecture: str
    layers: tuple[Layer, ...]
    depth: int
    """Decoder layers, those without a cache included: what pipeline stages divide."""
    attention_heads: int
    """Query heads, which tensor parallelism must divide; 0 where there are none."""
    repeats_heads: bool = True
    """Whether vLLM's implementation repeats kv heads where there are more ranks."""
    output_groups: int | None = None
    """Groups of the output projection, where it has such: vLLM deals them out to ranks."""
    dtype: str = "bf16"
    max_len: int | None = None
    cache: str = "auto"
    """The cache dtype that the checkpoint asks for."""
    source: str = ""
    confidence: str = ""
    warnings: tuple[str, ...] = ()
    """What was assumed where the config did not say."""

    @classmethod
    def load(
        cls,
        source: Any,
        *,
        dtype: str | None = None,
        ssm_dtype: str | None = None,
        conv_dtype: str | None = None,
        engine: Engine = "vllm",
    ) -> Model:
        """What the model of `source` caches.

        `source` is a path to a config.json or its folder, a dict, a transformers config,
        a catalogue name or entry, a hub id, or a model, which is returned as it is.
        `dtype` is what the model is served in, where that is not what its config says: fp32
        checkpoints are served in 16 bits unless it asks for fp32. Recurrent states are kept in
        what `engine` keeps them in, unless `ssm_dtype` or `conv_dtype` say otherwise.

        >>> model = Model.load("Qwen3-Next-80B-A3B", engine="sglang")
        >>> model.layers[0].name, model.layers[0].spec.ssm_dtype
        ('model.layers.0.linear_attn', 'fp32')
        """
        if engine not in get_args(Engine):
            hint = f"Use one of {', '.join(get_args(Engine))}"
            raise AtlasError(Code.UNKNOWN_ENGINE, got=repr(engine), hint=hint)
        served, ssm, conv = (
            name and DType.of(name).name for name in (dtype, ssm_dtype, conv_dtype)
        )
        states = StateDtypes(engine, ssm, conv)
        if not isinstance(source, Model):
            return read_model(find_config(source), states, served)
        if states != StateDtypes() or served not in (None, source.dtype):
            raise AtlasError(
                Code.UNREADABLE,
                "The dtypes of a loaded model are settled: its config is no longer there",
                got=f"model {source.name} with {states}, {served}",
                hint="Load the model's config, path or name with these options",
            )
        return source

    def with_cache(self, kv_dtype: str) -> Model:
        """The same model with its attention kept in `kv_dtype`.

        Recurrent states, indexers and compressors keep what they have: engines
        choose those apart from the cache dtype.

        >>> Model.load("Llama-3.1-8B").with_cache("fp8").layers[0].spec.page(16).content
        256
        """
        cache = check_cache(kv_dtype)
        sparse = any(isinstance(layer.spec, Indexer) for layer in self.layers)
        layers = tuple(
            replace(layer, spec=cached(layer.spec, cache, sparse=sparse)) for layer in self.layers
        )
        return replace(self, layers=layers, cache=cache)


def read_model(source: Source, states: StateDtypes = _BY_ENGINE, dtype: str | None = None) -> Model:
    """What the model of a config caches."""
    root, warnings = Config(source.values), list[str]()
    text = text_of(root)
    nested = text is not root
    outer, inner = _architecture(root), _architecture(text)
    model_type = text.text("model_type")
    if nested:
        text = with_defaults(text, model_type, warnings)
    architecture = outer or inner or model_type or ""
    family = find_family(text, outer, inner, model_type, root.text("model_type"))
    family = family or plain_family(text, architecture, warnings)
    prefix = PREFIXES.get(outer or "", "language_model." if nested else "")
    decoder = Decoder(
        config=text,
        dtype=dtype or _dtype(root, text, warnings),
        cache=checkpoint_cache(root, text, warnings),
        states=states,
        layers=prefix + family.layers,
        attention_name=family.attention,
    )
    return Model(
        name=source.name or root.text("_name_or_path") or architecture,
        architecture=architecture,
        layers=tuple(family.reader(decoder)),
        depth=decoder.depth,
        attention_heads=text.maybe(*QUERY_HEADS) or 0,
        # vLLM's gpt-oss divides its kv heads and stops there.
        repeats_heads=architecture != "GptOssForCausalLM",
        output_groups=text.maybe("o_groups"),
        dtype=decoder.dtype,
        max_len=min((n for key in _LENGTHS if (n := text.maybe(key))), default=None),
        cache=decoder.cache,
        source=source.origin,
        confidence=source.confidence,
        warnings=tuple(warnings),
    )


def text_of(root: Config) -> Config:
    """The text model's own config, which multimodal models nest once or twice."""
    text = root
    for _ in range(3):
        text = text.section(*_TEXT) or text
    return text


def _architecture(config: Config) -> str | None:
    names = config.listing("architectures") or []
    if names and not isinstance(names[0], str):
        raise bad("architectures is not a list of words", names[0], "Write them in quotes")
    return names[0] if names else None


def _dtype(root: Config, text: Config, warnings: list[str]) -> str:
    given = root.get("dtype", "torch_dtype") or text.get("dtype", "torch_dtype")
    if given is None or given == "auto":
        warnings.append("dtype is absent: bf16 assumed")
        return "bf16"
    name = DType.of(given).name
    # Engines serve fp32 checkpoints in 16 bits.
    return "bf16" if name == "fp32" else name
