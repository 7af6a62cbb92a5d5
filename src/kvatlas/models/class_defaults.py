"""The defaults of transformers' config classes, for configs that omit a value.

A config file may omit a value that equals the default of its config class, and transformers and
vLLM then use that default. `class_defaults.json` contains these defaults for every model type with
a decoder. `make record-architectures` writes this file from the installed transformers.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from kvatlas.models.config import DEPTH, HEAD_DIM, HIDDEN, KEY_HEADS, QUERY_HEADS, Config
from kvatlas.models.package_data import package_data

_SYNONYMS = (
    DEPTH, QUERY_HEADS, KEY_HEADS, HEAD_DIM, HIDDEN,
    ("layer_types", "layers_block_type", "hybrid_override_pattern", "sliding_window_pattern",
     "attn_layer_indices", "attn_layer_period", "full_attention_interval", "per_layer_config"),
    ("sliding_window", "sliding_window_size", "attention_window_size"),
    ("global_head_dim", "num_global_key_value_heads", "per_layer_config"),
    ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads"),
    ("mamba_d_head", "mamba_head_dim", "mamba_headdim", "mamba_expand", "expand"),
    ("state_size", "ssm_state_size", "mamba_d_state"),
    ("conv_kernel", "mamba_d_conv"),
    ("n_groups", "mamba_n_groups", "mamba_ngroups"),
    ("compress_ratios", "compress_rates"),
    ("block_types", "layers_block_type", "layer_types"),
)  # fmt: skip
"""Keys that set the same value. A default applies only if none of its synonyms is present."""


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `class_defaults.json`."""

    transformers: str
    """The version of transformers from which the defaults were recorded."""
    defaults: dict[str, dict[str, Any]]
    """Default values, by model type and config key."""
    model_types: dict[str, str]
    """Model types by architecture."""
    without_decoder: frozenset[str]
    """Model types that generate no tokens: encoders, vision, audio and diffusion models."""


@functools.cache
def recorded() -> Recorded:
    """Return the recorded defaults.

    >>> recorded().defaults["gemma2"]["num_key_value_heads"]
    4
    """
    return msgspec.json.decode(package_data("class_defaults.json"), type=Recorded)


def missing_defaults(config: Config, model_type: str | None) -> dict[str, Any]:
    """Return the defaults of `model_type` for keys that the config does not contain.

    >>> missing_defaults(Config({"num_hidden_layers": 2}), "gemma2")["num_key_value_heads"]
    4
    """
    found = {}
    for name, value in recorded().defaults.get(model_type or "", {}).items():
        same = [names for names in _SYNONYMS if name in names]
        if not config.contains(name, *(other for names in same for other in names)):
            found[name] = value
    return found


def default_warnings(config: Config, filled: dict[str, Any]) -> list[str]:
    """Return a warning for each default in `filled` that a reader of the config has used."""
    return [
        f"{name} is missing: using the default, {value}"
        for name, value in filled.items()
        if config.was_read(name) and value not in (None, False)
    ]


def other_key_heads(config: Config, architecture: str) -> str | None:
    """Return a warning if a config has no number of KV heads but its class may have a default.

    Use this function for configs without a model type: their config class is not certain.
    """
    model_type = recorded().model_types.get(architecture, "")
    default = recorded().defaults.get(model_type, {}).get("num_key_value_heads")
    if default is None or not config.was_read("num_key_value_heads") or config.has(*KEY_HEADS):
        return None
    return (
        "num_key_value_heads and model_type are missing: using the number of query heads; the "
        f"default of {model_type} is {default}"
    )
