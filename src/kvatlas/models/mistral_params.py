"""Read Mistral's params.json: rename its keys to the keys of a config.json.

Mistral publishes its models with a params.json, and vLLM reads it with `--config-format mistral`.
The keys are renamed as in vLLM 0.32's `transformers_utils/configs/mistral.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvatlas.models.config import bad

_REQUIRED = {"dim", "n_layers", "n_heads"}
_NAMES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
    "activation": "hidden_act",
}
_EXPERTS = {
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "first_k_dense_replace": "first_k_dense_replace",
    "route_every_n": "moe_layer_freq",
    "expert_hidden_dim": "moe_intermediate_size",
    "num_shared_experts": "n_shared_experts",
}


def is_mistral(values: Mapping[str, Any]) -> bool:
    """Return whether a config has the keys of a params.json.

    >>> is_mistral({"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8})
    True
    """
    return values.keys() >= _REQUIRED and "architectures" not in values


def from_mistral(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a params.json with the keys of a config.json.

    >>> from_mistral({"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8})
    ... # doctest: +NORMALIZE_WHITESPACE
    {'hidden_size': 4096, 'num_hidden_layers': 32, 'num_attention_heads': 32,
     'num_key_value_heads': 8, 'architectures': ['MistralForCausalLM']}
    """
    text = {_NAMES.get(key, key): value for key, value in values.items() if key != "model_type"}
    _rename_windows(text)
    _rename_quantisation(text)
    experts = text.pop("moe", None) or {}
    latent = bool(text.get("qk_nope_head_dim"))
    if latent:
        text["architectures"] = ["MistralLarge3ForCausalLM"]
        text |= {_EXPERTS[key]: value for key, value in experts.items() if key in _EXPERTS}
    elif experts:
        text["architectures"] = ["MixtralForCausalLM"]
        text["num_local_experts"] = experts.get("num_experts")
        text["num_experts_per_tok"] = experts.get("num_experts_per_tok")
    else:
        text["architectures"] = ["MistralForCausalLM"]
    vision = text.pop("vision_encoder", None) or text.pop("multimodal", None)
    if vision is None:
        return text
    outer = {"architectures": ["PixtralForConditionalGeneration"], "text_config": text}
    return {**outer, "vision_config": vision}


def _rename_quantisation(text: dict[str, Any]) -> None:
    """Replace the section `quantization` by the section of a config.json."""
    section = text.pop("quantization", None)
    if isinstance(section, Mapping) and section.get("qformat_weight") == "fp8_e4m3":
        section = {"quant_method": "fp8"}
    if section:
        text["quantization_config"] = section


def _rename_windows(text: dict[str, Any]) -> None:
    """Replace a list of windows, which repeats over the layers, by `layer_types` and one window."""
    windows, depth = text.get("sliding_window"), text.get("num_hidden_layers")
    if not isinstance(windows, list):
        return
    sizes = sorted({one for one in windows if one is not None})
    if not windows or not isinstance(depth, int) or depth % len(windows) or len(sizes) > 1:
        raise bad(
            "The windows in the list sliding_window must be equal or null, and the length of the "
            "list must divide the number of layers",
            f"{windows!r} for {depth!r} layers",
            "Correct sliding_window in params.json",
        )
    kinds = ["full_attention" if one is None else "sliding_attention" for one in windows]
    text["layer_types"] = kinds * (depth // len(windows))
    text["sliding_window"] = sizes[0] if sizes else None
