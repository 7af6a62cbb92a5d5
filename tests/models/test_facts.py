"""All recorded configs against vLLM's own answers, where a folder of them is at hand.

`KVATLAS_FACTS` names a folder with `configs/` and `facts/plans_by_config.json`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvatlas.geometry import DType
from kvatlas.models import Layer, Model
from kvatlas.specs import (
    ChunkedAttention,
    CompressorState,
    Indexer,
    LatentAttention,
    Mamba2,
    Recurrent,
    SlidingAttention,
    SlidingLatentAttention,
)
from tests.cases import each

FACTS = os.environ.get("KVATLAS_FACTS")
pytestmark = pytest.mark.skipif(FACTS is None, reason="KVATLAS_FACTS names no folder")

Key = tuple[Any, ...]


def records() -> list[dict[str, Any]]:
    if FACTS is None:
        return []
    path = Path(FACTS) / "facts" / "plans_by_config.json"
    return list(json.loads(path.read_bytes()))


RECORDS = records()


@cache
def model_of(config: str) -> Model:
    return Model.load(Path(FACTS or "") / "configs" / config)


def members_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [member for group in record["groups"] for member in group.get("members", [group])]


def kind_of(layer: Layer) -> str:
    match layer.spec:
        case Recurrent():
            return "mamba"
        case SlidingLatentAttention() | CompressorState():
            return "sliding_window_mla"
        case LatentAttention() | Indexer():
            return "mla_attention"
        case SlidingAttention():
            return "sliding_window"
        case ChunkedAttention():
            return "chunked_local_attention"
    return "full_attention"


def recorded(member: dict[str, Any]) -> Key:
    shapes = [tuple(shape) for shape in member.get("state_shapes", [])]
    dtypes = [DType.of(name).name for name in member.get("state_dtypes", [])]
    page = (member["H"], member["N"], member["C_bytes"], member["unpadded_page_size_bytes"])
    local = (member.get("window"), member.get("chunk"))
    return (member["kind"], *page, *local, tuple(shapes), tuple(dtypes))


def computed(layer: Layer, block: int, tp: int) -> Key:
    spec = layer.spec
    page = spec.page(block, tp=tp)
    recurrent = isinstance(spec, Recurrent)
    fields = [field for field in page.fields if not field.padding] if recurrent else []
    shapes = tuple(tuple(axis.size for axis in field.axes) for field in fields)
    dtypes = tuple(field.dtype.name for field in fields)
    local = (getattr(spec, "window", None), getattr(spec, "chunk", None))
    size = page.heads * page.states * page.content
    return (kind_of(layer), page.heads, page.states, page.content, size, *local, shapes, dtypes)


@each([r for r in RECORDS if "groups" in r])
def test_layers_are_those_that_vllm_registers(record: dict[str, Any]) -> None:
    model = model_of(record["config"])
    assert (record["kv_dtype_used"] == "fp8") == (model.cache == "fp8_e4m3")
    wanted: Counter[Key] = Counter()
    ends: dict[Key, list[str]] = {}
    blocks: dict[Key, int] = {}
    for member in members_of(record):
        key = recorded(member)
        wanted[key] += member["num_layers"]
        blocks[key] = member["block_size"]
        ends.setdefault(key, []).extend([member["first_layer"], member["last_layer"]])
    assert sum(wanted.values()) == len(model.layers)
    for key, count in wanted.items():
        same_kind = [layer for layer in model.layers if kind_of(layer) == key[0]]
        block = blocks[key]
        alike = [
            layer.name
            for layer in same_kind
            if block % (layer.spec.tokens_per_state or 1) == 0
            and computed(layer, block, record["tp"]) == key
        ]
        assert len(alike) == count
        assert set(ends[key]) <= set(alike)
        assert {alike[0], alike[-1]} <= set(ends[key])


@each([r for r in RECORDS if "error" in r])
def test_what_vllm_refuses_by_its_sizes_is_refused(record: dict[str, Any]) -> None:
    """Its crashes, which are no rule, are left out."""
    model, tp = model_of(record["config"]), record["tp"]
    if "attention heads" in record["error_kind"]:
        assert model.attention_heads % tp
    elif "n_groups" in record["error_kind"]:
        # kvatlas repeats groups past their number; vLLM only a single one.
        mixers = [layer.spec for layer in model.layers if isinstance(layer.spec, Mamba2)]
        assert all(mixer.groups > 1 and mixer.groups % tp for mixer in mixers)
