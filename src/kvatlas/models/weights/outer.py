"""Weights outside a model's layers: embeddings, the last norm and lm_head."""

from __future__ import annotations

from kvatlas.models.config import Config
from kvatlas.models.weights.decoders import Text, Traits
from kvatlas.models.weights.tensor import Tensor, linear, norm


def vocabulary(text: Text) -> tuple[list[Tensor], list[Tensor]]:
    """Return a list with the embedding, and a list with lm_head."""
    rows = text.config.count("padded_vocab_size", "vocab_size")  # the first is ChatGLM's
    width = embedding_width(text)
    embedding = [Tensor("embedding", "embed_tokens", rows, width, parts=rows)]
    return embedding, [Tensor("lm_head", "lm_head", rows, width, parts=rows, linear=True)]


def embedding_width(text: Text) -> int:
    """Return the width of the embedding's rows, which may differ from the hidden size."""
    key = text.traits.embedding_width
    return (text.config.maybe(key) if key else None) or text.hidden


def before_layers(text: Text) -> list[Tensor]:
    """Return the weights between the embedding and the first layer.

    The weights are position embeddings, embeddings of some families, and projections.
    """
    config, traits, width = text.config, text.traits, embedding_width(text)
    tensors = first_tensors(text)
    if traits.positions:
        key, more = traits.positions
        rows = config.count(key, *_POSITIONS) + more
        wide = width if traits.head == "bert" else text.hidden
        tensors.append(Tensor("embedding", "embed_positions", rows, wide))
    if traits.head == "bert":
        types = config.natural("type_vocab_size")
        tensors.append(Tensor("norm", "token_type_embeddings", types, width))
    if traits.more is not None:
        tensors += traits.more(text)
    if width != text.hidden:
        tensors += linear("mlp", "project_in", text.hidden, width, bias=traits.head == "bert")
    return tensors


def after_layers(text: Text) -> list[Tensor]:
    """Return the weights between the last layer and lm_head, and the bias of lm_head."""
    config, traits, width = text.config, text.traits, embedding_width(text)
    # BERT's only norm outside the layers is in its embedding.
    wide = width if traits.head == "bert" else text.hidden
    norms = [norm("norm", wide, bias=traits.norm_bias) for _ in range(traits.outer_norms)]
    tensors = [*norms, *last_tensors(text)]
    if traits.head == "bert":
        tensors += linear("mlp", "transform.dense", width, text.hidden, bias=True)
        tensors.append(norm("transform.LayerNorm", width, bias=True))
    elif width != text.hidden:
        tensors += linear("mlp", "project_out", width, text.hidden)
    if traits.head != "plain":
        rows = config.count("vocab_size")
        tensors.append(Tensor("lm_head", "lm_head.bias", rows, parts=rows))
    return tensors


_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")


def tied(root: Config, text: Config, traits: Traits) -> bool:
    """Return whether lm_head shares the embedding's weights."""
    if not traits.ties:
        return False
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
