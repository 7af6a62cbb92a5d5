"""Ten plans of `kvatlas releases 0.32 0.33`, computed by hand from vLLM's source.

A rank has 60 GiB, and the chip is sm90. The arithmetic follows vLLM's functions:

- `Platform._align_hybrid_block_size`: a hybrid's block is k * ceil(state / (k * token)) tokens. k
  is 16 for FlashAttention, 128 for MLA, and 64 for Qwen's gated delta nets in 0.33, where
  FlashInfer prefills them.
- `MambaSpec.max_memory_usage_bytes`: a request holds 2 blocks per recurrent group; 3 if the
  prefill saves a state (Mamba-2, FlashKDA in Kimi-K3, FlashInfer in 0.33).
- `get_max_concurrency_for_kv_cache_config`: requests = blocks / blocks per request.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("typer")

from kvatlas.models import catalogue
from kvatlas.planning import plan
from tests.cli.helpers import said, shown

MEMORY = 60 << 30
BF16, FP32 = 2, 4


class Hand(NamedTuple):
    """The figures of one plan."""

    block: int
    """Tokens per block."""
    block_bytes: int
    at_4k: int
    """Blocks that a decoding request of 4,096 tokens holds."""
    at_32k: int


# One KV head of 256 elements per rank: K and V take 2 * 256 * 2 = 1,024 bytes per token and layer.
QWEN_TOKEN = 2 * 1 * 256 * BF16
# Convolution: 3 inputs of (2 * 16 key heads + value heads) * 128 channels; state: 128 x 128 each.
QWEN397_TP8 = 3 * (32 + 64) * 128 // 8 * BF16 + 64 // 8 * 128 * 128 * FP32
QWEN397_TP2 = 3 * (32 + 64) * 128 // 2 * BF16 + 64 // 2 * 128 * 128 * FP32
QWEN_NEXT = 3 * (32 + 32) * 128 // 8 * BF16 + 32 // 8 * 128 * 128 * BF16
QWEN35 = 3 * (32 + 32) * 128 // 8 * BF16 + 32 // 8 * 128 * 128 * FP32
QWEN27 = 3 * (32 + 48) * 128 // 8 * BF16 + 48 // 8 * 128 * 128 * FP32
# K, V and Q each have a convolution over heads * 128 channels; MLA has 512 + 64 elements per token.
MLA_TOKEN = (512 + 64) * BF16
KIMI_K3 = 3 * 3 * 96 // 8 * 128 * BF16 + 96 // 8 * 128 * 128 * FP32
KIMI_LINEAR = 3 * 3 * 32 // 8 * 128 * BF16 + 32 // 8 * 128 * 128 * FP32
# Convolution over 128 heads * 64 + 2 * 8 groups * 128 channels; states of 64 x 128.
NEMOTRON = 3 * (128 * 64 + 2 * 8 * 128) // 8 * BF16 + 128 // 8 * 64 * 128 * FP32


def test_the_bytes_of_states() -> None:
    assert (QWEN397_TP8, QWEN397_TP2) == (533_504, 2_134_016)
    assert (QWEN_NEXT, QWEN35, QWEN27) == (137_216, 268_288, 400_896)
    assert (KIMI_K3, KIMI_LINEAR, NEMOTRON) == (814_080, 271_360, 531_968)


# A model with three groups of states and one of attention holds 3 * 2 blocks of states per request
# in 0.32, and 3 * 3 in 0.33.
CHANGED: dict[tuple[str, int], tuple[Hand, Hand]] = {
    # 60 layers: 15 of attention, 3 * 15 of states. 533,504 / 16,384 = 32.6; / 65,536 = 8.1.
    ("Qwen3.5-397B-A17B", 8): (
        Hand(16 * 33, 15 * 528 * QWEN_TOKEN, 8 + 3 * 2, 63 + 3 * 2),
        Hand(64 * 9, 15 * 576 * QWEN_TOKEN, 8 + 3 * 3, 57 + 3 * 3),
    ),
    # 2,134,016 / 16,384 = 130.3; / 65,536 = 32.6.
    ("Qwen3.5-397B-A17B", 2): (
        Hand(16 * 131, 15 * 2096 * QWEN_TOKEN, 2 + 3 * 2, 16 + 3 * 2),
        Hand(64 * 33, 15 * 2112 * QWEN_TOKEN, 2 + 3 * 3, 16 + 3 * 3),
    ),
    # 48 layers: 12 of attention, 3 * 12 of states. 137,216 / 16,384 = 8.4; / 65,536 = 2.1.
    ("Qwen3-Next-80B-A3B", 8): (
        Hand(16 * 9, 12 * 144 * QWEN_TOKEN, 29 + 3 * 2, 228 + 3 * 2),
        Hand(64 * 3, 12 * 192 * QWEN_TOKEN, 22 + 3 * 3, 171 + 3 * 3),
    ),
    # 40 layers: 10 of attention, 3 * 10 of states. 268,288 / 16,384 = 16.4; / 65,536 = 4.1.
    ("Qwen3.5-35B-A3B", 8): (
        Hand(16 * 17, 10 * 272 * QWEN_TOKEN, 16 + 3 * 2, 121 + 3 * 2),
        Hand(64 * 5, 10 * 320 * QWEN_TOKEN, 13 + 3 * 3, 103 + 3 * 3),
    ),
    # 64 layers: 16 of attention, 3 * 16 of states. 400,896 / 16,384 = 24.5; / 65,536 = 6.1.
    ("Qwen3.6-27B", 8): (
        Hand(16 * 25, 16 * 400 * QWEN_TOKEN, 11 + 3 * 2, 82 + 3 * 2),
        Hand(64 * 7, 16 * 448 * QWEN_TOKEN, 10 + 3 * 3, 74 + 3 * 3),
    ),
}
SAME: dict[tuple[str, int], Hand] = {
    # 24 layers of MLA, 3 * 23 of KDA with FlashKDA. 814,080 / (128 * 1,152) = 5.5.
    ("Kimi-K3", 8): Hand(128 * 6, 24 * 768 * MLA_TOKEN, 6 + 3 * 3, 43 + 3 * 3),
    # 7 layers of MLA; 20 of KDA in groups of 7, 7 and 6. 271,360 / 147,456 = 1.8.
    ("Kimi-Linear-48B-A3B", 8): Hand(128 * 2, 7 * 256 * MLA_TOKEN, 16 + 3 * 2, 128 + 3 * 2),
    # 4 layers of attention with one head of 128 elements, 6 * 4 of Mamba-2. 531,968 / 8,192 = 64.9.
    ("Nemotron-H-8B", 8): Hand(16 * 65, 4 * 1040 * 2 * 128 * BF16, 4 + 6 * 3, 32 + 6 * 3),
    # 12 layers each. A window of 128 tokens holds 8 blocks, and one because it starts anywhere.
    ("gpt-oss-20b", 8): Hand(16, 12 * 16 * 2 * 64 * BF16, 256 + 9, 2048 + 9),
    # 61 layers, each with latent rows, and with indexer keys of 128 bytes and a scale of 4 bytes.
    ("DeepSeek-V3.2", 8): Hand(64, 61 * 64 * (MLA_TOKEN + 128 + 4), 64, 512),
}
ALL = CHANGED | {case: (figures, figures) for case, figures in SAME.items()}


@pytest.mark.parametrize(("name", "tp"), ALL)
def test_plans_are_those_computed_by_hand(name: str, tp: int) -> None:
    for release, hand in zip(("0.32", "0.33"), ALL[name, tp], strict=True):
        made = plan(name, memory=MEMORY, tp=tp, policy=f"vllm@{release}", chip="sm90")
        blocks = MEMORY // hand.block_bytes
        assert (made.block_size, made.num_blocks) == (hand.block, blocks)
        for length, held in ((4096, hand.at_4k), (32768, hand.at_32k)):
            assert made.requests(length, in_flight=1) == pytest.approx(blocks / held)


RECORDED = json.loads(Path(__file__).with_name("vllm_answers.json").read_text())


@pytest.mark.parametrize("chip", ["sm80", "sm90", "sm100"])
def test_the_command_prints_what_vllm_answered(chip: str) -> None:
    """Block size, and decoding requests of 4k and 32k, that the recorder got from each release."""
    answer = said("releases", "0.32", "0.33", "--chip", chip, "--memory", "140GiB")
    compared = changed = 0
    for row in answer["rows"]:
        sides, refusals = [], False
        for side, release in (("older", "0.32"), ("newer", "0.33")):
            answers = RECORDED[release].get(row["model"], {}).get("8", [])
            given = [one for chips, one in answers if chip in chips.split()]
            refusals |= isinstance(given[0], str) if given else False
            if not given or isinstance(given[0], str):
                continue
            block, fits = given[0][0], given[0][6]
            assert row[side] == pytest.approx([block, fits[1], fits[3]], abs=2e-4), row["model"]
            sides.append(row[side])
            compared += 1
        changed += len(sides) == 2 and sides[0] != sides[1]
        assert refusals == any("refuses" in note for note in row["warnings"]), row["model"]
    assert compared > 100
    assert changed == (0 if chip == "sm80" else 5)


def test_the_command_lists_models_without_a_plan() -> None:
    answer = said("releases", "0.32", "0.33", "--tp", "3")
    assert len(answer["rows"]) + len(answer["left_out"]) == len(catalogue())
    text = " ".join(shown("releases", "0.32", "0.33", "--tp", "3").split())
    assert f"{len(answer['left_out'])} models have no plan with tp 3" in text


def test_the_command_prints_these_figures() -> None:
    rows = {
        row["model"]: row for row in said("releases", "0.32", "0.33", "--memory", "60GiB")["rows"]
    }
    for (name, tp), both in ALL.items():
        if tp != 8:
            continue
        for side, hand in zip(("older", "newer"), both, strict=True):
            blocks = MEMORY // hand.block_bytes
            expected = [hand.block, blocks / hand.at_4k, blocks / hand.at_32k]
            assert rows[name][side] == pytest.approx(expected, abs=1e-4)
        assert rows[name]["changed"] == ((name, tp) in CHANGED)
