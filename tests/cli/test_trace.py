"""`kvatlas trace`, and what simulations report about a trace and its requests beyond the limit."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.helpers import kvatlas, said, shown

TRACE = str(Path(__file__).parents[1] / "pool" / "sample_trace.jsonl")
SMALL = ("Llama-3.1-8B", "--memory", "2GiB", "--in-flight", "512")


def test_what_a_trace_contains() -> None:
    facts = said("trace", TRACE)
    assert facts["requests"] == 90
    assert facts["prompt_lengths"]["max"] == 8_466
    assert facts["shared_tokens"] + facts["distinct_tokens"] / facts["prompt_tokens"] == 1
    assert facts["notes"] == []
    text = shown("trace", TRACE)
    for words in ("90 requests", "per second", "63.0% of the", "8,466", "new tokens between"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_file_that_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"colour": 1}\n')
    result = kvatlas("trace", str(path))
    assert result.exit_code == 2
    assert "bad_trace" in result.stderr


def test_requests_beyond_the_limit_are_set_aside_in_every_output(tmp_path: Path) -> None:
    lengths = [json.loads(line)["input_length"] for line in Path(TRACE).read_text().splitlines()]
    beyond = sum(length >= 6_000 for length in lengths)
    options = ["simulate", *SMALL, "--trace", TRACE, "--max-len", "6000"]
    (row,) = said(*options)["rows"]
    assert (row["set_aside"], row["limit"]) == (beyond, 6_000)
    assert row["requests"] == len(lengths) - beyond
    assert row["tokens"] == sum(length for length in lengths if length < 6_000)
    note = f"{beyond} requests of the trace exceed the limit of 6,000 tokens."
    assert note in " ".join(shown(*options).split())
    page = tmp_path / "page.html"
    shown(*options[:-4], "--max-len", "6000", "--trace", TRACE, "-o", str(page),
          "--compare", "memory=1GiB,2GiB")  # fmt: skip
    assert note in page.read_text()
    chosen = ["plan", *SMALL, "--trace", TRACE, "--max-len", "6000", "--block-size", "16"]
    assert said(*chosen)["tried"][0]["set_aside"] == beyond
    assert f"{beyond} requests are set aside" in " ".join(shown(*chosen).split())


def test_without_max_len_the_limit_is_the_models(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    rows = [{"input_length": 512 * n, "hash_ids": [*range(n)]} for n in (1, 79, 80, 90)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (row,) = said("simulate", "Qwen3-8B", "--trace", str(path))["rows"]
    assert (row["set_aside"], row["limit"]) == (2, 40_960)
    path.write_text(json.dumps(rows[-1]) + "\n")
    result = kvatlas("simulate", "Qwen3-8B", "--trace", str(path))
    assert result.exit_code == 2
    assert "All requests of the trace exceed the limit of 40,960" in result.stderr


def test_hit_rates_of_lengths_are_unknown(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:15:{n % 60:02}.5,{1000 + n},{n}" for n in range(60)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    options = ["simulate", *SMALL, "--max-len", "4K", "--trace", str(path)]
    found = said(*options, "--arrivals")
    assert found["rows"][0]["hit_rate"] is None
    assert found["rows"][0]["peak_blocks"] > 0
    assert any("Hit rates are unknown" in note for note in found["notes"])
    text = " ".join(shown(*options).split())
    assert "unknown" in text
    assert "%" not in text
    for wrong in ([*options, "-o", str(tmp_path / "page.html")], ["plan", *options[1:]]):
        result = kvatlas(*wrong)
        assert result.exit_code == 2
        assert "Hit rates of this trace are unknown" in result.stderr
