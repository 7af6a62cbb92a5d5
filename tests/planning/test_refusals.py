"""What cannot be planned: a stable code for each reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvatlas import AtlasError, Code
from kvatlas.planning import plan, quantity
from kvatlas.planning.request import length
from tests.planning.models import model_of

GIB: dict[str, Any] = {"memory": "60GiB"}

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
    (Code.BAD_PACK, lambda: plan("Nemotron-H-8B", **GIB, pack=5)),
    (Code.BAD_PACK, lambda: plan("Nemotron-H-8B", **GIB, pack=0)),
    (Code.BAD_PACK, lambda: plan("Llama-3.1-8B", **GIB, pack=2)),
    (Code.BAD_PACK, lambda: plan("Nemotron-H-8B", **GIB, pack=2, layout="LHBNC")),
    (Code.UNKNOWN_POLICY, lambda: plan("Llama-3.1-8B", **GIB, policy="best")),  # type: ignore[arg-type]
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
