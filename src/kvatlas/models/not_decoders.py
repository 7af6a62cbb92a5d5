"""Raise errors for models that have no KV cache, or caches that cannot be planned."""

from __future__ import annotations

import re

from kvatlas.errors import AtlasError, Code
from kvatlas.models.class_defaults import recorded
from kvatlas.models.config import Config

_TASKS = (
    r"For(MaskedLM|ImageClassification|MaskedImageModeling|ObjectDetection|.*Segmentation"
    r"|SequenceClassification|TokenClassification|QuestionAnswering|MultipleChoice|CTC"
    r"|AudioClassification|AudioFrameClassification|VideoClassification|DepthEstimation|XVector"
    r"|ZeroShot\w+|KeypointDetection|Retrieval|NextSentencePrediction|ImageToImage|TextEncoding)$"
)

_OF_IMAGES = ("image_size", "patch_size", "num_channels", "num_mel_bins")
_VOCABULARY = ("vocab_size", "padded_vocab_size", "n_vocab", "text_config", "llm_config")

REFUSED = {
    "blt": "it combines four models, whose caches grow with bytes or with patches of bytes",
    "gemma4_assistant": "it is a draft model, which reads the caches of its target model",
    "gemma4_unified_assistant": "it is a draft model, which reads the caches of its target model",
    "inkling_text": "each layer caches four convolution states in addition to K and V",
    "inkling2_text": "each layer caches convolution states in addition to K and V",
    "reformer": "it caches hidden states and hash buckets instead of K and V",
    "xlm": "it has no cache",
    "xlnet": "it caches hidden states instead of K and V",
    "xlstm": "it caches the matrix memories of mLSTM layers, for which there is no spec",
    "zaya": "each layer caches convolution states of compressed attention in addition to K and V",
}
"""Model types of transformers' causal language models that cannot be planned, with the reason."""


def refuse_by_name(*names: str | None) -> None:
    """Raise an error if one of the names belongs to a model whose caches cannot be planned.

    The names are model types and architectures.

    >>> refuse_by_name("xlm")
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: kvatlas cannot plan a KV cache for this model. Got 'xlm': it has no \
cache. Plan another model, or compute the cache size of this one by hand. [unknown_architecture]
    """
    for name in names:
        if name not in REFUSED:
            continue
        raise AtlasError(
            Code.UNKNOWN_ARCHITECTURE,
            "kvatlas cannot plan a KV cache for this model",
            got=f"{name!r}: {REFUSED[name]}",
            hint="Plan another model, or compute the cache size of this one by hand",
        )


def refuse_without_decoder(config: Config, architecture: str) -> None:
    """Raise an error if an unknown config describes a model that generates no tokens.

    Encoders, vision and audio models, and diffusion models generate no tokens.
    """
    model_type = config.text("model_type") or ""
    known = recorded()
    kind = ""
    if config.has("_class_name", "_diffusers_version"):
        kind = "a diffusion model"
    elif architecture not in known.model_types and (
        model_type in known.without_decoder
        or re.search(_TASKS, architecture)
        or (config.has(*_OF_IMAGES) and not config.has(*_VOCABULARY))
    ):
        kind = "an encoder, vision or audio model without a decoder"
    if kind:
        name = " ".join(
            filter(
                None, (architecture or config.text("_class_name"), model_type and f"({model_type})")
            )
        )
        raise AtlasError(
            Code.UNKNOWN_ARCHITECTURE,
            f"This config describes {kind}, which has no KV cache",
            got=name or "no architecture",
            hint="Pass the config of a language model, or the whole config of a multimodal one",
        )
