"""Record the defaults of transformers' config classes in src/kvatlas/models/class_defaults.json.

Run it with the newest transformers that is supported: `make record-architectures`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto import configuration_auto, modeling_auto

OUT = Path(__file__).parents[1] / "src" / "kvatlas" / "models" / "class_defaults.json"

_GENERATE = (
    "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ", "TEXT_TO_WAVEFORM",
)  # fmt: skip
_RELEVANT = re.compile(
    r"layer|head|^hidden_size$|^d_model$|^n_embd$|dim$|kv|window|index|conv|state|_rank$|expand|ssm"
    r"|mamba|lru|block_types|pattern|interval|period|offset|multi_query|new_decoder|chunk_size"
    r"|compress|k_eq_v|^dim$|n_groups|hybrid|n_positions|max_position|num_mem"
)
_IRRELEVANT = re.compile(
    r"layerdrop|layer_norm|layernorm|moe|mlp|expert|dense|token|_id$|bias|hidden_act|drop|vision"
    r"|audio|image|intermediate|ffn|eps$|init|theta|scale|mask|decay|output_hidden|classif|encoder"
    r"|feed_forward|no_rope_layer|ple_|rel_|hc_|label|summary|adapter|logits|head_act|normali|residual"
)


def generating_types() -> dict[str, str]:
    """Return the architecture of each model type that generates tokens."""
    found: dict[str, str] = {}
    for task in reversed(_GENERATE):
        names = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        found |= {kind: one if isinstance(one, str) else one[0] for kind, one in names.items()}
    return found


def class_of(model_type: str) -> Any:
    """Return the config class of a text model; for a multimodal model, that of its text model."""
    kind = transformers.CONFIG_MAPPING[model_type]
    nested = getattr(kind, "sub_configs_defaults", {}) or {}
    for name in ("text_config", "decoder", "language_config", "llm_config"):
        inner = getattr(nested.get(name), "model_type", None)
        if inner in transformers.CONFIG_MAPPING:
            return transformers.CONFIG_MAPPING[inner]
    sub = getattr(kind, "sub_configs", {}).get("text_config")
    return sub if isinstance(sub, type) and hasattr(sub, "model_type") else kind


def defaults_of(kind: Any) -> dict[str, Any]:
    """Return the defaults of a config class that may change its caches."""
    found = {}
    for field in dataclasses.fields(kind):
        plain = isinstance(field.default, int | list | tuple)
        if plain and _RELEVANT.search(field.name) and not _IRRELEVANT.search(field.name):
            found[field.name] = field.default
    return found


def main() -> None:
    """Write the file."""
    generating = generating_types()
    defaults: dict[str, dict[str, Any]] = {}
    for model_type in sorted(generating):
        kind = class_of(model_type)
        defaults[model_type] = defaults_of(kind)
        if getattr(kind, "model_type", None):
            defaults.setdefault(kind.model_type, defaults_of(kind))
    translating = set(modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    masked = set(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES) - translating
    known = set(configuration_auto.CONFIG_MAPPING_NAMES)
    texts = {name for name in known if name.endswith("_text") or "decoder" in name}
    recorded = {
        "transformers": transformers.__version__,
        "defaults": {name: values for name, values in sorted(defaults.items()) if values},
        "model_types": {
            name: kind
            for kind, name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
            if isinstance(name, str)
        },
        "without_decoder": sorted((known - set(generating) - set(defaults) - texts) | masked),
    }
    lines = ",\n".join(
        f"{json.dumps(key)}: {_lines(value) if isinstance(value, dict) else json.dumps(value)}"
        for key, value in recorded.items()
    )
    OUT.write_text("{\n" + lines + "\n}\n")
    print(f"{len(defaults)} model types, transformers {transformers.__version__}: {OUT.name}")


def _lines(values: dict[str, Any]) -> str:
    return "{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in values.items()) + "}"


if __name__ == "__main__":
    main()
