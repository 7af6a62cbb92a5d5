"""Weights outside a model's layers: embeddings, the last norm and lm_head."""

from __future__ import annotations

from kvatlas.models.config import Config
from kvatlas.models.weights.decoders import Text, Traits
from kvatlas.models.weights.tensor import Tensor, linear, norm


def vocabulary(config: Config) -> tuple[Tensor, Tensor]:
    rows, hidden = config.count("vocab_size"), config.hidden()
    embedding = Tensor("embedding", "embed_tokens", rows, hidden, parts=rows)
    return embedding, Tensor("lm_head", "lm_head", rows, hidden, parts=rows, linear=True)


def tied(root: Config, text: Config, traits: Traits) -> bool:
    for config in (text, root):
        if config.has("tie_word_embeddings"):
            return config.flag("tie_word_embeddings")
    return traits.tied


def first_tensors(text: Text) -> list[Tensor]:
    """Return the per-layer embeddings of the small Gemma-4 models; empty for other models."""
    config, width = text.config, text.config.size("hidden_size_per_layer_input")
    if not width:
        return []
    wide, rows = width * text.depth, config.count("vocab_size_per_layer_input", "vocab_size")
    return [
        Tensor("embedding", "embed_tokens_per_layer", rows, wide, parts=rows),
        *linear("mlp", "per_layer_model_projection", wide, text.hidden),
        norm("per_layer_projection_norm", width),
    ]


def last_tensors(text: Text) -> list[Tensor]:
    """Return the weights that mix DeepSeek-V4's residual streams after the layers.

    The list is empty for other models.
    """
    ways = text.config.maybe("hc_mult")
    if not ways:
        return []
    mix = Tensor("norm", "hc_head_fn", ways, ways * text.hidden)
    return [mix, Tensor("norm", "hc_head_base, hc_head_scale", ways + 1)]
