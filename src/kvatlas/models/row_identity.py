"""`row_identity`: the identity under which engines of different kinds share rows in a store.

Engines may store the elements of K in different orders: rotary embeddings rotate pairs of elements,
and an engine may keep the elements of a pair adjacent or half a head apart. The identity of
rows therefore includes the name of an order. Orders have names only for the model families in which
the rows of different engines were compared, element by element. For all other families, the name of
the engine replaces the name of the order, so that engines of different kinds do not share rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvatlas.models.cache_identity import CacheIdentity, config_identity

HALF_SPLIT = "half-split"
"""Of the r rotated elements of a head, elements i and i + r / 2 are a pair. All other elements of
all fields are in the order in which the checkpoint's weights produce them."""

COMPARED = {
    "gemma3_text": HALF_SPLIT,
    "gpt_oss": HALF_SPLIT,
    "granitemoehybrid": HALF_SPLIT,
    "llama": HALF_SPLIT,
    "mistral": HALF_SPLIT,
    "qwen3": HALF_SPLIT,
}
"""The order of elements by `model_type` of the config: vLLM 0.32 and transformers store equal rows.

`tests/vllm/test_engine_rows.py` compares them.
"""

_ROPE_KEYS = {
    "default": frozenset({"rope_theta"}),
    "linear": frozenset({"rope_theta", "factor"}),
    "llama3": frozenset(
        {
            "rope_theta",
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        }
    ),
    "yarn": frozenset(
        {
            "rope_theta",
            "factor",
            "beta_fast",
            "beta_slow",
            "truncate",
            "original_max_position_embeddings",
        }
    ),
}
"""Parameters by type of rotary embedding with which rows were compared."""


def element_order(config: Mapping[str, Any]) -> str | None:
    """Return the order of elements in the rows of a model.

    `config` is the model's config as transformers writes it. Returns None if engines of different
    kinds may store different orders or different rows.

    >>> rope = {"rope_type": "default", "rope_theta": 10000.0}
    >>> element_order({"model_type": "llama", "rope_parameters": rope})
    'half-split'
    >>> element_order({"model_type": "llama4_text", "rope_parameters": rope}) is None
    True
    >>> element_order({"model_type": "llama", "rope_parameters": {"rope_type": "dynamic"}}) is None
    True
    """
    if config.get("quantization_config") is not None:
        return None
    compared = all(map(_is_compared, _rope_parameters(config.get("rope_parameters"))))
    return COMPARED.get(str(config.get("model_type"))) if compared else None


def row_identity(identity: CacheIdentity, *, elements: str, dtype: str) -> CacheIdentity:
    """Return `identity` extended by the order of elements in rows and the dtype of computation.

    `elements` is the result of `element_order`, or the name of the engine if that result is None.
    `dtype` is the dtype in which the engine computes.

    >>> served = CacheIdentity(weights="sha256:5f1a", config="c0")
    >>> vllm = row_identity(served, elements="vllm", dtype="bf16")
    >>> vllm == row_identity(served, elements="transformers", dtype="bf16")
    False
    """
    inputs = {"config": identity.config, "compute": dtype, "elements": elements}
    return msgspec.structs.replace(identity, config=config_identity(inputs))


def _rope_parameters(found: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters of each rotary embedding: a config has one, or one per type of layer."""
    if not isinstance(found, Mapping):
        return
    nested = [one for one in found.values() if isinstance(one, Mapping)]
    yield from nested or [found]


def _is_compared(rope: Mapping[str, Any]) -> bool:
    known = _ROPE_KEYS.get(str(rope.get("rope_type", "default")), frozenset())
    given = {key for key, value in rope.items() if value is not None and key != "rope_type"}
    return bool(known) and given <= known
