"""`kvatlas plan --trace`: a plan chosen by simulation, and everything that was compared."""

from __future__ import annotations

from pathlib import Path

import kvatlas as library
from tests.cli.helpers import kvatlas, said, shown

TRACE = str(Path(__file__).parents[1] / "pool" / "sample_trace.jsonl")
HYBRID = ("plan", "Qwen3.5-397B-A17B", "--memory", "8GiB", "--max-len", "9K", "--trace", TRACE)


def test_the_plan_that_finds_the_most_is_chosen(tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    answer = said(*HYBRID, "--save", str(saved))
    tried = answer["tried"]
    best = max(tried, key=lambda row: row["hit_rate"])
    assert tried[0]["hit_rate"] == best["hit_rate"]
    assert library.Plan.from_json(saved.read_bytes()).block_size == answer["block_size"]
    assert answer["block_size"] == tried[0]["block"]
    # vLLM's plan as vLLM runs it was among what was tried, so it cannot be better.
    (theirs,) = [row for row in tried if row["as_vllm_runs_it"]]
    assert theirs["checkpoints"] == "vllm-default"
    assert theirs["hit_rate"] < tried[0]["hit_rate"] <= theirs["ceiling"]
    assert {row["plan"] for row in tried} >= {"atlas", "vllm", "pack 4"}


def test_a_table_says_why() -> None:
    text = shown(*HYBRID)
    assert "branch-points" in text
    assert "vllm, as vLLM runs it" in text
    assert "Unlimited memory would serve 63.0%" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


def test_without_states_blocks_are_compared_and_a_given_one_stays() -> None:
    options = ("plan", "Llama-3.1-8B", "--memory", "2GiB", "--max-len", "8K", "--trace", TRACE)
    tried = said(*options)["tried"]
    assert {row["block"] for row in tried} == {16, 32, 64, 128, 256}
    tried = said(*options, "--block-size", "64")["tried"]
    assert {row["block"] for row in tried} == {64}


def test_a_trace_may_say_how_many_tokens_its_ids_stand_for(tmp_path: Path) -> None:
    trace = tmp_path / "mine.jsonl"
    trace.write_text('{"input_length": 96, "hash_ids": [1, 2, 3]}\n' * 2)
    options = ("plan", "Llama-3.1-8B", "--memory", "2GiB", "--max-len", "8K", "--block-size", "32")
    refused = kvatlas(*options, "--trace", str(trace))
    assert "line 1" in refused.stderr
    tried = said(*options, "--trace", str(trace), "--trace-block", "32")["tried"]
    assert tried[0]["found"] > 0
    assert kvatlas(*options, "--trace-block", "32").exit_code == 2


def test_a_trace_chooses_one_plan() -> None:
    result = kvatlas(*HYBRID, "--compare", "policy")
    assert result.exit_code == 2
    assert "--trace" in result.stderr
