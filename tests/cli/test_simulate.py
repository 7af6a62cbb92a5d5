"""`kvatlas simulate`: tables, JSON, comparisons and refusals, on a small trace of our own."""

from __future__ import annotations

from pathlib import Path

from tests.cli.helpers import kvatlas, said, shown

SHORT = ("--max-len", "8K", "--in-flight", "512")
TRACE = str(Path(__file__).parents[1] / "pool" / "sample_trace.jsonl")


def test_several_models_in_one_table() -> None:
    text = shown(
        "simulate", "Llama-3.1-8B", "gpt-oss-20b", "--memory", "2GiB", "--trace", TRACE, *SHORT
    )
    assert "90 requests" in text
    assert "Llama-3.1-8B" in text
    assert "--active-params" in text  # gpt-oss does not say how many parameters a token meets
    assert max(map(len, text.splitlines())) <= 80


def test_every_figure_has_a_name() -> None:
    (row,) = said("simulate", "Llama-3.1-8B", "--memory", "2GiB", "--trace", TRACE, *SHORT)["rows"]
    assert 0 < row["hit_rate"] <= row["ceiling"] < 1
    assert row["found"] + row["computed"] == row["tokens"]
    assert row["flops_saved"] < row["flops"]
    assert row["peak_blocks"] <= row["blocks"]
    assert {"hit_rate_by_request", "hit_rate_last_half", "computed_again", "evictions"} <= set(row)


def test_the_legend_bounds_what_can_be_found_and_small_counts_are_exact() -> None:
    options = ["Llama-3.1-8B", "--memory", "1100MiB", "--trace", TRACE, *SHORT]
    (row,) = said("simulate", *options)["rows"]
    text = " ".join(shown("simulate", *options).split())
    assert f"(at most {row['ceiling']:.1%}, if every token were kept and could be reused)" in text
    assert 0 < row["computed_again"] < 100_000
    assert f" {row['computed_again']:,} " in text


def test_memory_is_not_compared_on_gpus(tmp_path: Path) -> None:
    asked = ["simulate", "Qwen3-8B", "--gpu", "H100", "--trace", TRACE]
    page = ["-o", str(tmp_path / "page.html")]
    for more, got in (
        (["--compare", "memory"], "--compare memory and --gpu"),
        (["--compare", "memory", *page], "--output and --gpu"),
        (page, "--output and --gpu"),
    ):
        result = kvatlas(*asked, *more)
        assert result.exit_code == 2
        told = " ".join(result.output.split())
        assert got in told
        assert "Omit --gpu" in told
        assert "more memory" not in told


def test_side_by_side() -> None:
    options = ["Qwen3.5-397B-A17B", "--memory", "6GiB", "--trace", TRACE]
    rows = said("simulate", *options, "--compare", "policy=vllm,atlas,uniform")["rows"]
    vllm, atlas, uniform = rows
    assert atlas["hit_rate"] > vllm["hit_rate"]
    assert uniform["refused_plan"]["code"] == "pages_not_unified"
    every = said("simulate", *options, "--compare", "eviction,checkpoints")["rows"]
    assert len(every) == 6 + 6
    text = shown("simulate", *options, "--compare", "eviction", "--compare", "memory=6GiB,9GiB")
    assert "s3-fifo" in text
    assert "9GiB" in text


def test_more_memory_finds_no_less() -> None:
    options = ["gpt-oss-20b", "--trace", TRACE, *SHORT, "--compare", "memory=1GiB,2GiB,4GiB,8GiB"]
    rates = [row["hit_rate"] for row in said("simulate", *options)["rows"]]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]


def test_requests_under_way_hold_their_blocks() -> None:
    options = ["Llama-3.1-8B", "--memory", "1100MiB", "--trace", TRACE, "--tflops", "1", *SHORT]
    (alone,) = said("simulate", *options)["rows"]
    (crowd,) = said("simulate", *options, "--arrivals")["rows"]
    assert crowd["arrivals"]
    assert crowd["waited"] > 0
    assert crowd["hit_rate"] != alone["hit_rate"]


def test_what_cannot_be_simulated_is_refused(tmp_path: Path) -> None:
    lies = tmp_path / "lies.jsonl"
    lies.write_text('{"input_length": 600, "hash_ids": [1, 2, 3]}\n')
    refused = {
        ("Llama-3.1-8B", "--trace", str(lies)): "bad_trace",
        ("Llama-3.1-8B", "--trace", str(tmp_path / "none")): "unreadable",
        ("Llama-3.1-8B", "--trace", TRACE, "--eviction", "mru"): "unknown_policy",
        ("Llama-3.1-8B", "--trace", TRACE, "--checkpoints", "never"): "unknown_policy",
        ("Whisper-large-v3", "--trace", TRACE): "contradictory",
    }
    for options, code in refused.items():
        result = kvatlas("simulate", *options)
        assert result.exit_code == 2, result.output
        assert code in result.stderr
    result = kvatlas("simulate", "Llama-3.1-8B", "--trace", TRACE, "--compare", "colour")
    assert result.exit_code == 2


def test_curves_over_memory_are_a_page_without_a_network(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    options = ["Qwen3.5-397B-A17B", "--trace", TRACE, "--max-len", "9K", "-o", str(page)]
    # 100 MiB hold no request: a point that is missing, and no reason to fail.
    compared = ["--compare", "memory=100MiB,2GiB,4GiB", "--compare", "policy=vllm,atlas"]
    rows = said("simulate", *options, *compared)["rows"]
    assert [bool(row["refused_plan"]) for row in rows] == [True] * 2 + [False] * 4
    text = page.read_text()
    for row in rows[2:]:
        assert f"<td>{row['hit_rate']:.1%}</td>" in text
    assert text.count('class="curve') == 2 * 2  # in the picture and in the legend
    assert text.count("<circle") == 4
    assert "at most 63.0%" in text
    assert "prefers-color-scheme: dark" in text
    for word in ("http:", "https:", "<script", "url(", "@import"):
        assert word not in text
    result = kvatlas("simulate", *options[:-1], str(tmp_path / "no" / "page.html"), *compared)
    assert result.exit_code == 2
    assert "cannot write" in result.stderr


def test_what_a_tier_finds_and_how_it_should_be_split() -> None:
    options = ["Qwen3.5-397B-A17B", "--memory", "2GiB", "--max-len", "8K", "--trace", TRACE]
    tiers = ["--host-memory", "3GiB", "--disk", "2GiB"]
    none, shared, split = said("simulate", *options, *tiers, "--compare", "tier=none,shared,25")[
        "rows"
    ]
    assert none["found_by_tier"] == {"gpu": none["found"]}
    for row in (shared, split):
        assert list(row["found_by_tier"]) == ["gpu", "host", "disk"]
        assert sum(row["found_by_tier"].values()) == row["found"] > none["found"]
    text = shown("simulate", *options, *tiers)
    assert "found in" in text
    assert "disk" in text
    # Ranks share the host: two of them find what one finds.
    (two,) = said("simulate", *options[:1], "--tp", "2", "--memory", "1GiB", *options[3:], *tiers)[
        "rows"
    ]
    assert list(two["found_by_tier"]) == ["gpu", "host", "disk"]
    sizes = said("simulate", *options, "--compare", "host-memory=1GiB,3GiB")["rows"]
    assert [row["value"] for row in sizes] == ["1GiB", "3GiB"]
    assert none["found"] < sizes[0]["found"] < sizes[1]["found"]
    for wrong in (["--compare", "tier"], [*tiers, "--arrivals"], [*tiers, "--compare", "tier=x"]):
        result = kvatlas("simulate", *options, *wrong)
        assert result.exit_code == 2, wrong
