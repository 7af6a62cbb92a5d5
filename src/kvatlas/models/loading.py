"""`load`: a model from whatever its owner has at hand.

A path, a dict, a transformers object, a catalogue name and a hub id all become one
mapping, and from there on there is one way: find the text model in it, find its
family, let the family's reader list the caches.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import DType
from kvatlas.models.architectures import PREFIXES, find_family, plain_family, with_defaults
from kvatlas.models.cache_dtypes import checkpoint_cache
from kvatlas.models.catalogue import Entry, catalogue, find
from kvatlas.models.config import QUERY_HEADS, Config, bad
from kvatlas.models.decoder import Decoder, Engine
from kvatlas.models.model import Model

LARGEST_FILE = 16 * 2**20
"""Bytes of the largest config that is read; real ones have a few thousand."""

_TEXT = ("text_config", "llm_config", "language_config", "thinker_config", "language_model_config")
_LENGTHS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length",
    "max_target_positions", "max_sequence_length",
)  # fmt: skip
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def load(
    source: Any,
    *,
    ssm_dtype: str | None = None,
    conv_dtype: str | None = None,
    engine: Engine = "vllm",
) -> Model:
    """What the model of `source` caches.

    `source` is a path to a config.json or its folder, a dict, a transformers config,
    a catalogue name, or a hub id. Recurrent states are kept in what `engine` keeps
    them in, unless `ssm_dtype` or `conv_dtype` say otherwise.

    >>> model = load("Qwen3-Next-80B-A3B", engine="sglang")
    >>> model.layers[0].name, model.layers[0].spec.ssm_dtype
    ('model.layers.0.linear_attn', 'fp32')
    """
    if engine not in get_args(Engine):
        raise AtlasError(
            Code.UNKNOWN_ENGINE,
            "An engine is one whose state dtypes kvatlas knows",
            got=repr(engine),
            hint=f"Use one of {', '.join(get_args(Engine))}",
        )
    states = {"ssm": ssm_dtype, "conv": conv_dtype}
    dtypes = {key: DType.of(name).name for key, name in states.items() if name is not None}
    if isinstance(source, Model):
        return source
    if isinstance(source, Entry):
        return _from_entry(source, engine, dtypes)
    if isinstance(source, Mapping):
        return read(source, "", engine=engine, **dtypes)
    if isinstance(source, str | os.PathLike):
        return _from_name(source, engine, dtypes)
    if callable(getattr(source, "to_dict", None)):
        values = source.to_dict()
        if isinstance(values, Mapping):
            return read(values, "", engine=engine, **dtypes)
    raise AtlasError(
        Code.UNREADABLE,
        "A model comes from a path, a mapping, a transformers config, a name or a hub id",
        got=type(source).__name__,
        hint="Pass the path of its config.json",
    )


def _from_name(source: str | os.PathLike[str], engine: Engine, dtypes: dict[str, str]) -> Model:
    path, text = Path(source), str(source)
    there = not isinstance(source, str) or text.endswith(".json") or (text != "" and _exists(path))
    if not there and (entry := find(text)) is not None:
        return _from_entry(entry, engine, dtypes)
    if there:
        values, name = _from_file(path)
        return read(values, name, source=text, engine=engine, **dtypes)
    if _HUB_ID.fullmatch(text):
        values, _ = _from_file(_from_hub(text))
        return read(values, text, source=f"hub: {text}", engine=engine, **dtypes)
    close = difflib.get_close_matches(text, list(catalogue()), n=3, cutoff=0.4)
    raise AtlasError(
        Code.UNKNOWN_MODEL,
        "A model's name is in the catalogue, or is a path or a hub id",
        got=repr(text),
        hint=f"Did you mean {', '.join(close)}" if close else "Pass the path of its config.json",
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _from_entry(entry: Entry, engine: Engine, dtypes: dict[str, str]) -> Model:
    values = {"dtype": "bfloat16", **entry.expanded()}
    return read(
        values,
        entry.name,
        source="; ".join(entry.source),
        confidence=entry.confidence,
        engine=engine,
        **dtypes,
    )


def _from_file(path: Path) -> tuple[Mapping[str, Any], str]:
    """The mapping in a config.json, or in the one of a folder, and a name for it."""
    if path.is_dir():
        path = path / "config.json"
    try:
        if path.exists() and not path.is_file():
            raise _unreadable(path, "no plain file", "Pass a config.json")
        with path.open("rb") as file:
            text = file.read(LARGEST_FILE + 1)
        if len(text) > LARGEST_FILE:
            raise _unreadable(path, "a larger file", "Pass the config.json alone")
        # The standard library's reader takes the Infinity that some real configs hold.
        values = json.loads(text)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise _unreadable(path, reason, "Check the path") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, AtlasError):
            raise
        reason = f"{type(error).__name__}: {error}"
        raise _unreadable(path, reason[:200], "Fetch the file again") from error
    if not isinstance(values, dict):
        raise _unreadable(path, f"a {type(values).__name__}", "Pass a config.json, not its parts")
    name = path.parent.name if path.name == "config.json" else path.stem.removesuffix("_config")
    return values, name


def _unreadable(path: Path, got: str, hint: str) -> AtlasError:
    return AtlasError(
        Code.UNREADABLE,
        f"A config is one JSON object of at most {LARGEST_FILE >> 20} MiB",
        got=f"{path}: {got}",
        hint=hint,
    )


def _from_hub(name: str) -> Path:
    hint = "Download its config.json and pass the path"
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise AtlasError(
            Code.NO_HUB,
            "A hub id is looked up where huggingface_hub is installed",
            got=f"{name!r}, which is no path and not in the catalogue",
            hint=f"Install huggingface_hub, or: {hint.lower()}",
        ) from error
    try:
        return Path(hub.hf_hub_download(name, "config.json"))
    except Exception as error:
        # Its errors have many bases: whatever it raises, the config did not come.
        raise AtlasError(
            Code.NO_HUB,
            "A hub id is looked up where the hub can be reached",
            got=f"{name!r}: {type(error).__name__}: {str(error)[:200]}",
            hint=hint,
        ) from error


def read(
    values: Mapping[str, Any],
    name: str,
    *,
    source: str = "",
    confidence: str = "",
    engine: Engine = "vllm",
    ssm: str | None = None,
    conv: str | None = None,
) -> Model:
    """What the model of a config, given as a mapping, caches."""
    root, warnings = Config(values), list[str]()
    text = _text_of(root)
    nested = text is not root
    outer, inner = _architecture(root), _architecture(text)
    model_type = text.text("model_type")
    if nested:
        text = with_defaults(text, model_type, warnings)
    found = find_family(text, outer, inner, model_type, root.text("model_type"))
    architecture = outer or inner or model_type or ""
    family = found[1] if found else plain_family(text, architecture, warnings)
    prefix = PREFIXES.get(outer or "", "language_model." if nested else "")
    decoder = Decoder(
        config=text,
        architecture=architecture,
        dtype=_dtype(root, text, warnings),
        cache=checkpoint_cache(root, text, warnings),
        engine=engine,
        ssm=ssm,
        conv=conv,
        layers=prefix + family.layers,
        attention_name=family.attention,
        warnings=warnings,
    )
    layers = tuple(family.reader(decoder))
    lengths = [length for key in _LENGTHS if (length := text.maybe(key)) is not None]
    return Model(
        name=name or root.text("_name_or_path") or architecture,
        architecture=architecture,
        layers=layers,
        depth=decoder.depth,
        attention_heads=text.maybe(*QUERY_HEADS) or 0,
        # vLLM's gpt-oss divides its kv heads and stops there.
        repeats_heads=architecture != "GptOssForCausalLM",
        output_groups=text.maybe("o_groups"),
        dtype=decoder.dtype,
        max_len=min(lengths) if lengths else None,
        cache=decoder.cache,
        source=source,
        confidence=confidence,
        warnings=tuple(warnings),
    )


def _text_of(root: Config) -> Config:
    """The text model's own config, which multimodal models nest once or twice."""
    text = root
    for _ in range(3):
        inner = text.section(*_TEXT)
        if inner is None:
            break
        text = inner
    return text


def _architecture(config: Config) -> str | None:
    names = config.listing("architectures") or []
    if names and not isinstance(names[0], str):
        raise bad("architectures is a list of words", names[0], "Write them in quotes")
    return names[0] if names else None


def _dtype(root: Config, text: Config, warnings: list[str]) -> str:
    found = root.get("dtype", "torch_dtype") or text.get("dtype", "torch_dtype")
    if found is None or found == "auto":
        warnings.append("dtype is absent: bf16 assumed")
        return "bf16"
    name = DType.of(found).name
    # Engines serve fp32 checkpoints in 16 bits.
    return "bf16" if name == "fp32" else name
