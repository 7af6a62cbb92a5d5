"""Rows have one name in engines of different kinds only if their elements were compared."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from kvatlas.models import CacheIdentity
from kvatlas.models.row_identity import COMPARED, element_order, row_identity

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0, "truncate": False}


def config(**values: Any) -> dict[str, Any]:
    return {"model_type": "llama", "rope_parameters": ROPE, **values}


def test_the_identity_is_that_of_the_specification() -> None:
    inputs = {"compute": "bf16", "config": "c0", "elements": "half-split"}
    text = json.dumps(inputs, sort_keys=True, separators=(",", ":")).encode()
    served = CacheIdentity(weights="w", config="c0", adapter="a", salt="s", tenant="t")
    found = row_identity(served, elements="half-split", dtype="bf16")
    digest = hashlib.blake2b(text, digest_size=16).hexdigest()
    assert found == CacheIdentity(weights="w", config=digest, adapter="a", salt="s", tenant="t")


@pytest.mark.parametrize("family", COMPARED)
def test_families_that_were_compared_have_a_name_for_their_order(family: str) -> None:
    assert element_order(config(model_type=family)) == "half-split"


@pytest.mark.parametrize(
    "values",
    [
        {"rope_parameters": YARN},
        {"rope_parameters": None},
        {"rope_parameters": {"full_attention": ROPE, "sliding_attention": YARN}},
    ],
    ids=str,
)
def test_rotary_embeddings_that_were_compared(values: dict[str, Any]) -> None:
    assert element_order(config(**values)) == "half-split"


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "llama4_text"},
        {"model_type": "deepseek_v3"},
        {"model_type": "gemma3"},  # with images
        {"model_type": "gemma2"},
        {"model_type": "falcon_h1"},
        {"model_type": None},
        {"quantization_config": {"quant_method": "fp8"}},
        {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_parameters": ROPE | {"rope_type": "longrope"}},
        {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
        {"rope_parameters": YARN | {"attention_factor": 1.5}},
        {"rope_parameters": {"full_attention": ROPE, "sliding_attention": YARN | {"mscale": 1}}},
    ],
    ids=str,
)
def test_what_was_not_compared_has_no_name(values: dict[str, Any]) -> None:
    assert element_order(config(**values)) is None
