"""`Model`: the caches of a whole model, layer by layer, independent of memory.

A model has a name, the numbers that limit its parallelism, and one `Layer` for each cache.
A decoder layer may have several caches (attention and an indexer, attention and Mamba) or
none (an MLP, a layer that shares another layer's cache). Therefore the name of a `Layer` is
the name of a cache in the engine, not of a decoder layer.

`Model.load` finds the config, the text model in it, and the family of that model. The
family's reader then lists the caches.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec
from msgspec.structs import replace

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import DType
from kvatlas.models.architectures import (
    PREFIXES,
    find_family,
    plain_family,
    unlike_families,
)
from kvatlas.models.cache_dtypes import cached, check_cache, checkpoint_cache
from kvatlas.models.class_defaults import default_warnings, missing_defaults, other_key_heads
from kvatlas.models.config import KEY_HEADS, QUERY_HEADS, Config, bad
from kvatlas.models.decoder import Decoder, Engine, StateDtypes
from kvatlas.models.layer import Layer
from kvatlas.models.not_decoders import refuse_by_name, refuse_without_decoder
from kvatlas.models.omitted_caches import omission_warnings
from kvatlas.models.per_layer_config import apply_per_layer
from kvatlas.models.sources import Source, find_config
from kvatlas.models.unread_keys import outer_warnings, unread_warnings
from kvatlas.specs import Indexer

_TEXT = ("text_config", "llm_config", "language_config", "thinker_config", "language_model_config")
_LENGTHS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length",
    "max_target_positions", "max_sequence_length",
)  # fmt: skip
_BY_ENGINE = StateDtypes()
_DECISIVE = (
    "num_hidden_layers",
    "num_key_value_heads",
    "head_dim",
    "layer_types",
    "sliding_window",
)


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The caches of a model, in the order in which an engine registers them.

    >>> model = Model.load("gpt-oss-20b")
    >>> model.layers[0].name, model.layers[0].spec.window
    ('model.layers.0.attn.attn', 128)
    """

    name: str
    architecture: str
    layers: tuple[Layer, ...]
    depth: int
    """Decoder layers, including those without a cache. Pipeline stages divide these."""
    attention_heads: int
    """Number of query heads, which the tensor-parallel size must divide; 0 if there are none."""
    repeats_heads: bool = True
    """Whether vLLM replicates KV heads when there are more ranks than KV heads."""
    output_groups: int | None = None
    """Groups of the output projection. vLLM divides them over the ranks. None if there are none."""
    dtype: str = "bf16"
    """The dtype in which the model is served."""
    max_len: int | None = None
    """The longest context, in tokens; None if the config does not specify it."""
    cache: str = "auto"
    """The cache dtype that the checkpoint requests."""
    source: str = ""
    """The origin of the config: a path, a hub id or a catalogue source."""
    confidence: str = ""
    """For a catalogue model, how reliable its numbers are."""
    warnings: tuple[str, ...] = ()
    """Assumptions made for values that the config lacks."""

    @classmethod
    def load(
        cls,
        source: Any,
        *,
        dtype: str | None = None,
        ssm_dtype: str | None = None,
        conv_dtype: str | None = None,
        engine: Engine = "vllm",
        oracle: Literal["transformers"] | None = None,
    ) -> Model:
        """Load a model from its config and list its caches.

        `source` is a path to a config.json or its folder, a dict, a transformers config, a
        catalogue name or entry, a hub id, or a `Model`, which is returned unchanged. `dtype` is the
        dtype in which the model is served, by default the config's dtype, or bf16 for an fp32
        checkpoint. `ssm_dtype` and `conv_dtype` override the dtypes in which `engine` stores
        recurrent states. With `oracle="transformers"`, transformers builds the model without
        weights and runs a few tokens. `load` then raises an error unless transformers caches the
        tensors that kvatlas expects.

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
            found = find_config(source)
            model = read_model(found, states, served)
            if not _is_oracle(oracle):
                return model
            from kvatlas.models.verification import verify  # rare, and loads transformers

            note = verify(model.layers, found, model.max_len)
            return replace(model, warnings=(*model.warnings, note)) if note else model
        if states != StateDtypes() or served not in (None, source.dtype) or _is_oracle(oracle):
            options = {"dtype": served, "ssm_dtype": ssm, "conv_dtype": conv, "engine": engine}
            options["oracle"] = oracle
            given = ", ".join(f"{name}={value!r}" for name, value in options.items() if value)
            raise AtlasError(
                Code.UNREADABLE,
                "The options of a loaded model cannot be changed",
                got=f"model {source.name} with {given}",
                hint="Pass these options when you load the model from its config, path or name",
            )
        return source

    def with_cache(self, kv_dtype: str) -> Model:
        """Return the model with its attention cached in `kv_dtype`.

        The dtypes of recurrent states, indexers and compressors do not change, because
        engines configure them separately.

        >>> Model.load("Llama-3.1-8B").with_cache("fp8").layers[0].spec.page(16).content
        256
        """
        cache = check_cache(kv_dtype)
        sparse = any(isinstance(layer.spec, Indexer) for layer in self.layers)
        layers = tuple(
            replace(layer, spec=cached(layer.spec, cache, sparse=sparse)) for layer in self.layers
        )
        return replace(self, layers=layers, cache=cache)


def _is_oracle(oracle: str | None) -> bool:
    if oracle not in (None, "transformers"):
        problem, hint = (
            "The only library that a model can be checked against is transformers",
            "Pass oracle='transformers', or None",
        )
        raise AtlasError(Code.UNKNOWN_ENGINE, problem, got=repr(oracle), hint=hint)
    return oracle is not None


def read_model(source: Source, states: StateDtypes = _BY_ENGINE, dtype: str | None = None) -> Model:
    """Return the model that the config in `source` describes; `dtype` overrides the config's."""
    root, warnings = Config(source.values), list[str]()
    text = text_of(root)
    nested = text is not root
    outer, inner = _architecture(root), _architecture(text)
    model_type = text.text("model_type")
    refuse_by_name(model_type, root.text("model_type"), outer, inner)
    if nested:
        _refuse_contradiction(root, text)
    # Entries of the catalogue are reduced to the keys that matter, so nothing is missing there.
    filled = {} if source.confidence else missing_defaults(text, model_type)
    text = text.completed(filled)
    architecture = outer or inner or model_type or ""
    family = find_family(text, outer, inner, model_type, root.text("model_type"))
    if family is None:
        refuse_without_decoder(root, outer or "")
        family = plain_family(text, architecture, warnings)
    elif note := unlike_families(outer or inner, model_type):
        warnings.append(note)
    prefix = PREFIXES.get(outer or "", "language_model." if nested else "")
    decoder = Decoder(
        config=text,
        dtype=dtype or _dtype(root, text, warnings),
        cache=checkpoint_cache(root, text, warnings),
        states=states,
        layers=prefix + family.layers,
        attention_name=family.attention,
    )
    layers = tuple(apply_per_layer(family.reader(decoder), text))
    depth, max_len = decoder.depth, _longest(text)
    heads = text.maybe(*QUERY_HEADS) or 0
    warnings += default_warnings(text, filled)
    if model_type is None and (note := other_key_heads(text, architecture)):
        warnings.append(note)
    warnings += unread_warnings(text)
    warnings += outer_warnings(root, text) if nested else []
    if note := _unlike_heads(text, heads):
        warnings.append(note)
    warnings += omission_warnings(text, family.reader)
    return Model(
        name=source.name or root.text("_name_or_path") or architecture,
        architecture=architecture,
        layers=layers,
        depth=depth,
        attention_heads=heads,
        # vLLM's gpt-oss divides its KV heads but never replicates them.
        repeats_heads=architecture != "GptOssForCausalLM",
        output_groups=text.maybe("o_groups"),
        dtype=decoder.dtype,
        max_len=max_len,
        cache=decoder.cache,
        source=source.origin,
        confidence=source.confidence,
        warnings=tuple(warnings),
    )


def _unlike_heads(text: Config, heads: int) -> str | None:
    """Return a warning if the number of KV heads does not divide the number of query heads.

    Only keys that a reader of the config has used are checked.
    """
    used = next((name for name in KEY_HEADS if text.was_read(name) and text.has(name)), None)
    own = text.maybe(used) if used else None
    if used is None or own is None or not heads or heads % own == 0:
        return None
    return f"{used} ({own}) does not divide the number of query heads ({heads})"


def _longest(text: Config) -> int | None:
    return min((n for key in _LENGTHS if (n := text.maybe(key))), default=None)


def _refuse_contradiction(root: Config, text: Config) -> None:
    """Raise an error if the outer config and its text config set a size to different values.

    transformers can save such a config: unknown keys in the outer part, and a text config with
    default values. Neither value can then be trusted.
    """
    for key in _DECISIVE:
        outer, inner = root.get(key), text.get(key)
        if outer is not None and outer != inner and text.contains(key):
            raise bad(
                f"The config sets {key} twice, with different values",
                f"{str(outer)[:60]} for the whole model, {str(inner)[:60]} for its text model",
                "Use the config of the model's own repository, not one that was saved again",
            )


def text_of(root: Config) -> Config:
    """Return the text model's config; multimodal configs contain it one or two levels deep."""
    text = root
    for _ in range(3):
        text = text.section(*_TEXT) or text
    return text


def _architecture(config: Config) -> str | None:
    names = config.listing("architectures") or []
    if names and not isinstance(names[0], str):
        raise bad(
            "architectures must be a list of strings",
            repr(names[0]),
            "Write every entry of architectures in quotes",
        )
    return names[0] if names else None


def _dtype(root: Config, text: Config, warnings: list[str]) -> str:
    given = root.get("dtype", "torch_dtype") or text.get("dtype", "torch_dtype")
    if given is None or given == "auto":
        warnings.append("dtype is missing: using bf16")
        return "bf16"
    name = DType.of(given).name
    if name not in ("fp32", "fp16", "bf16"):
        warnings.append(f"no engine serves a model in its dtype, {name}: using bf16")
        return "bf16"
    # Engines serve fp32 checkpoints in 16 bits.
    return "bf16" if name == "fp32" else name
