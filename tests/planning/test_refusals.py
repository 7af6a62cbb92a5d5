"""What cannot be planned: a stable code for each reason."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvatlas import AtlasError, Code, Placement
from kvatlas.models import Weights, find_gpus
from kvatlas.planning import Fitting, foreign, plan
from kvatlas.planning.request import length, quantity
from kvatlas.planning.topology import stage_layers
from tests.planning.models import model_of

H100 = find_gpus("H100")

GIB: dict[str, Any] = {"memory": "60GiB"}
LLAMA = Weights.load("Llama-3.1-8B")
LAYER = "model.layers.0.self_attn.attn"
PAGES = Placement.packed([("B", 4), ("N", 16), ("H", 8), ("C", 256)], item=2)

REFUSALS: list[tuple[Code, Callable[[], Any]]] = [
    (Code.NOT_ENOUGH_MEMORY, lambda: plan("Llama-3.1-8B", memory="1GiB")),
    (Code.NOT_ENOUGH_MEMORY, lambda: plan("Llama-3.1-8B", memory=1)),
    (Code.NOT_ENOUGH_MEMORY, lambda: plan("Llama-3.1-8B", memory="1GiB", policy="vllm")),
    (Code.NOT_ENOUGH_MEMORY, lambda: plan("Nemotron-H-8B", memory="200MiB")),
    (Code.NOT_ENOUGH_MEMORY, lambda: plan("Nemotron-H-8B", memory="4GiB", requests=10**6)),
    (Code.BAD_QUANTITY, lambda: plan("Llama-3.1-8B", memory="lots")),
    (Code.BAD_QUANTITY, lambda: plan("Llama-3.1-8B", memory="-5GiB")),
    (Code.BAD_QUANTITY, lambda: plan("Llama-3.1-8B", memory="9" * 5000)),
    (Code.BAD_QUANTITY, lambda: plan("Llama-3.1-8B", **GIB, max_len="32KiB")),
    (Code.BAD_SIZE, lambda: plan("Llama-3.1-8B", memory=0)),
    (Code.BAD_SIZE, lambda: plan("Llama-3.1-8B", **GIB, tp=0)),
    (Code.BAD_SIZE, lambda: plan("Llama-3.1-8B", **GIB, max_len=-1)),
    (Code.BAD_SIZE, lambda: plan("Llama-3.1-8B", **GIB, block_size=0)),
    (Code.BAD_SIZE, lambda: plan("Nemotron-H-8B", **GIB, requests=0)),
    (Code.NEGATIVE, lambda: plan("Llama-3.1-8B", **GIB, in_flight=-1)),
    (Code.NOT_AN_INTEGER, lambda: plan("Llama-3.1-8B", **GIB, tp=1.5)),  # type: ignore[arg-type]
    (Code.BAD_TOPOLOGY, lambda: plan("Llama-3.1-8B", **GIB, tp=3)),
    (Code.BAD_TOPOLOGY, lambda: plan("Llama-3.1-8B", **GIB, pp=33)),
    (Code.BAD_TOPOLOGY, lambda: plan("Llama-3.1-8B", **GIB, tp=4, dcp=3)),
    (Code.BAD_TOPOLOGY, lambda: plan("Llama-3.1-8B", **GIB, tp=8, dcp=2)),
    (Code.BAD_TOPOLOGY, lambda: plan("Gemma-2-2b", **GIB, tp=8, dcp=2)),
    (Code.BAD_TOPOLOGY, lambda: plan("gpt-oss-20b", **GIB, tp=16, policy="vllm")),
    (Code.BAD_TOPOLOGY, lambda: plan("DeepSeek-V4-Flash", **GIB, tp=16, policy="vllm")),
    (Code.TP_HEADS, lambda: plan("Phi-4", **GIB, tp=4)),
    (Code.UNKNOWN_BACKEND, lambda: plan("Llama-3.1-8B", **GIB, backend="FASTEST")),
    (Code.UNKNOWN_BACKEND, lambda: plan("Llama-3.1-8B", **GIB, backend="FLASHMLA")),
    (Code.BACKEND_REFUSES, lambda: plan("Llama-3.1-8B", **GIB, block_size=24)),
    (Code.BACKEND_REFUSES, lambda: plan("DeepSeek-V3", **GIB, backend="FLASHMLA", block_size=16)),
    (
        Code.BACKEND_REFUSES,
        lambda: plan("DeepSeek-V3", **GIB, backend="FLASH_ATTN_MLA", kv_dtype="fp8"),
    ),
    (Code.LAYOUT_REFUSED, lambda: plan("Qwen3.5-35B-A3B", **GIB, layout="LHBNC", policy="vllm")),
    (
        Code.LAYOUT_REFUSED,
        lambda: plan("Llama-3.1-8B", **GIB, layout="BLHNC", backend="CPU_ATTN", block_size=32),
    ),
    (Code.BAD_ORDER, lambda: plan("Llama-3.1-8B", **GIB, layout="LBNHX")),
    (Code.PAGES_NOT_UNIFIED, lambda: plan("Nemotron-H-8B", **GIB, policy="uniform")),
    (Code.BAD_PACK, lambda: plan("Nemotron-H-8B", **GIB, pack=1000)),
    (Code.BAD_PACK, lambda: plan("Nemotron-H-8B", **GIB, pack=0)),
    (Code.BAD_PACK, lambda: plan("Llama-3.1-8B", **GIB, pack=2)),
    (Code.BAD_PACK, lambda: plan("Nemotron-H-8B", **GIB, pack=2, layout="LHBNC")),
    (Code.UNKNOWN_POLICY, lambda: plan("Llama-3.1-8B", **GIB, policy="best")),
    (Code.UNKNOWN_POLICY, lambda: plan("Llama-3.1-8B", **GIB, policy=[])),  # type: ignore[arg-type]
    (Code.UNKNOWN_BACKEND, lambda: plan("Llama-3.1-8B", **GIB, backend=5)),  # type: ignore[arg-type]
    (Code.UNKNOWN_BACKEND, lambda: plan("Llama-3.1-8B", **GIB, backend="")),
    (Code.NOT_AN_INTEGER, lambda: plan("Bamba-9B", **GIB, pack="x")),  # type: ignore[arg-type]
    (Code.NOT_AN_INTEGER, lambda: plan("Bamba-9B", **GIB, pack=2.5)),  # type: ignore[arg-type]
    (Code.NOT_AN_INTEGER, lambda: plan("Bamba-9B", **GIB, pack=True)),
    (Code.BAD_PACK, lambda: plan("Bamba-9B", **GIB, pack=2, policy="vllm")),
    (Code.BACKEND_REFUSES, lambda: plan("DeepSeek-V3.2", **GIB, block_size=32)),
    (Code.NO_CACHE, lambda: plan(model_of("empty"), **GIB)),
    (Code.UNKNOWN_POLICY, lambda: plan("Bamba-9B", **GIB, states="far")),  # type: ignore[arg-type]
    (Code.BAD_SIZE, lambda: stage_layers(61, 0)),
    (Code.BAD_TOPOLOGY, lambda: stage_layers(61, 10**12)),
    (Code.NEGATIVE, lambda: stage_layers(-1, 2)),
    (Code.NOT_AN_INTEGER, lambda: LLAMA.per_rank(tp=1.5)),  # type: ignore[arg-type]
    (Code.NOT_AN_INTEGER, lambda: LLAMA.per_rank(ep=math.nan)),  # type: ignore[arg-type]
    (Code.BAD_TOPOLOGY, lambda: LLAMA.per_rank(tp=0)),
    (Code.BAD_SIZE, lambda: Fitting("Llama-3.1-8B", H100.gpu).best(H100._replace(number=0))),
    (Code.BAD_TENSOR, lambda: foreign("Qwen3-8B", {LAYER: np.zeros(4)})),  # type: ignore[dict-item]
    (Code.BAD_TENSOR, lambda: foreign("Qwen3-8B", {LAYER: PAGES}, blocks=1 << 40)),
    (Code.BAD_SIZE, lambda: foreign("Qwen3-8B", {LAYER: PAGES}, max_len=0)),
    (Code.BAD_PLAN, lambda: foreign("Qwen3-8B", {LAYER: PAGES}, pools={1: 0})),  # type: ignore[arg-type]
]


def test_refused_with_its_code() -> None:
    for number, (code, act) in enumerate(REFUSALS):
        with pytest.raises(AtlasError) as refusal:
            act()
        assert refusal.value.code is code, number


def test_unknown_cache_dtype() -> None:
    with pytest.raises(AtlasError):
        plan("Llama-3.1-8B", **GIB, kv_dtype="fp3")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("60GiB", 60 * 2**30),
        ("80GB", 80 * 10**9),
        ("1.5KiB", 1536),
        ("7", 7),
        (" 2 mb ", 2 * 10**6),
    ],
)
def test_quantities(text: str, value: int) -> None:
    assert quantity(text) == value


@pytest.mark.parametrize(("text", "value"), [("32k", 32000), ("32K", 32768), ("1M", 2**20), (9, 9)])
def test_lengths(text: str | int, value: int) -> None:
    assert length(text) == value


@pytest.mark.parametrize("policy", ["atlas", "vllm"])
@pytest.mark.parametrize("name", ["Qwen3-8B", "gpt-oss-20b", "Qwen3.5-397B-A17B", "Falcon-H1-34B"])
def test_too_little_memory_names_the_longest_request_that_fits(name: str, policy: Any) -> None:
    def fits(max_len: int) -> bool:
        try:
            plan(name, memory="1GiB", max_len=max_len, policy=policy)
        except AtlasError as refusal:
            assert refusal.code is Code.NOT_ENOUGH_MEMORY
            return False
        return True

    with pytest.raises(AtlasError) as refused:
        plan(name, memory="1GiB", max_len="1M", policy=policy)
    told = re.search(r"reduce max_len to ([\d,]+) tokens", refused.value.hint)
    assert told
    longest = int(told[1].replace(",", ""))
    assert fits(longest)
    assert not fits(longest + 1)


def test_memory_without_room_for_any_request_names_no_length() -> None:
    with pytest.raises(AtlasError) as refused:
        plan("Falcon-H1-34B", memory="300MiB")
    assert "max_len" not in refused.value.hint
