"""Policy `vllm` against an engine's answers for whole configs, where they are at hand.

`KVATLAS_FACTS` names a folder with `configs/*.json` and `facts/plans_by_config.json`.
`test_vllm.py` holds the same figures for reduced configs and needs nothing.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvatlas import AtlasError
from kvatlas.models import Model
from kvatlas.planning import plan
from tests.planning.test_vllm import groups_of, regions_of

FOLDER = Path(os.environ.get("KVATLAS_FACTS", ""))
ANSWERS = FOLDER / "facts" / "plans_by_config.json"
BACKENDS = {
    "sm90-FLASHMLA": "FLASHMLA",
    "sm90-default-FLASH_ATTN_MLA": "FLASH_ATTN_MLA",
    "sm100-default-FLASHINFER_MLA-like": "FLASHINFER_MLA",
}


def tensors(record: dict[str, Any]) -> list[list[int]]:
    keys = ("layer_stride", "block_stride", "offset", "num_layers")
    return [[tensor[key] for key in keys] for tensor in record["tensors"]]


def group_row(group: dict[str, Any]) -> list[Any]:
    head = ("kind", "num_layers", "first_layer", "last_layer", "block_size", "page_size_bytes")
    keys = ("num_layers", "first_layer", "block_size", "page_size_bytes")
    keys += ("unpadded_page_size_bytes", "H", "N", "C_bytes")  # type: ignore[assignment]
    members = [[member[key] for key in keys] for member in group.get("members", [group])]
    return [*(group[key] for key in head), members]


@pytest.mark.skipif("KVATLAS_FACTS" not in os.environ, reason="KVATLAS_FACTS is not set")
def test_every_record_agrees() -> None:
    wrong = []
    records = json.loads(ANSWERS.read_text())
    for record in records:
        name = f"{record['config']} tp {record['tp']} {record['variant']}"
        ask: dict[str, Any] = {
            "memory": record["mem_bytes"],
            "tp": record["tp"],
            "max_len": record["max_model_len"],
            "backend": BACKENDS.get(record["variant"]),
            "policy": "vllm",
        }
        model = Model.load(FOLDER / "configs" / record["config"])
        try:
            made = plan(model, in_flight=record.get("max_in_flight_tokens"), **ask)
        except AtlasError as refusal:
            if "error" not in record:
                wrong.append(f"{name}: refused, {refusal}")
            continue
        if "error" in record:
            wrong.append(f"{name}: not refused")
            continue
        ours = [made.block_size, made.num_blocks, made.bytes_per_block, made.layout, made.tokens]
        keys = ("block_size", "num_blocks", "bytes_per_block", "resolved_layout", "capacity_tokens")
        same = ours == [record[key] for key in keys]
        same &= sorted(made.accepted_layouts) == sorted(record["accepted_layouts"])
        same &= groups_of(made) == [group_row(group) for group in record["groups"]]
        same &= regions_of(made) == tensors(record)
        if not same:
            wrong.append(f"{name}: {ours}")
    assert not wrong
    assert len(records) > 200
