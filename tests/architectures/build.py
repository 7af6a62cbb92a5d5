"""Build the causal language models of the installed transformers from their default configs.

`build` returns the config, the number of parameters, and the shapes of what each layer has cached:
these are the answers that kvatlas is compared with.
"""

from __future__ import annotations

from typing import Any

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvatlas.models.cache_comparison import CachedLayer
from kvatlas.models.transformers_oracle import TOKENS, Built, build_config
from tests.architectures.buildable import NEEDED, NOT_BUILT, TEXT_ONLY

__all__ = ["TOKENS", "Built", "CachedLayer", "build", "build_config", "model_types"]


def model_types() -> list[str]:
    """Return the model types of the causal language models that can be built."""
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in NOT_BUILT]


def default_config(model_type: str) -> Any:
    """Return the default config of a model type, with the values that its model needs."""
    if model_type in ("musicgen", "musicgen_melody"):  # they need the config of an encoder
        model_type += "_decoder"
    config = transformers.CONFIG_MAPPING[model_type](**NEEDED.get(model_type, {}))
    if model_type in TEXT_ONLY:
        text = config.get_text_config(decoder=True)
        config = type(text)(**NEEDED.get(text.model_type, {}))
    if getattr(config, "is_decoder", None) is False and not config.is_encoder_decoder:
        config.is_decoder = True
    return config


def build(model_type: str) -> Built:
    """Build one architecture from its default config and run it."""
    config = default_config(model_type)
    # Gemma-3n's multimodal model needs packages for images.
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[
        "gemma3n_text" if model_type == "gemma3n" else model_type
    ]
    return build_config(config, getattr(transformers, name), model_type)
