"""`kvatlas budget`: the memory of one GPU, and flags of `vllm serve`."""

from __future__ import annotations

import pytest

from kvatlas.geometry.byte_sizes import size
from kvatlas.models import find_gpu
from tests.cli.helpers import kvatlas, said, shown


@pytest.mark.parametrize(
    "args",
    [
        ("Llama-3.1-70B", "--gpu", "4xH100"),
        ("DeepSeek-V3.2", "--gpu", "8xH200", "--dcp", "1"),
        ("gpt-oss-20b", "--gpu", "L40S", "--max-num-seqs", "64", "--max-loras", "2"),
        ("Qwen3-30B-A3B", "--gpu", "4xA100", "--dp", "2", "--ep", "4", "--max-len", "8K"),
    ],
)
def test_the_lines_and_the_cache_fill_the_share_of_the_engine(args: tuple[str, ...]) -> None:
    facts = said("budget", *args)
    inside = sum(line["nbytes"] for line in facts["lines"] if line["inside"])
    assert inside + facts["kv"] == int(find_gpu(facts["gpu"]).memory * facts["utilization"])
    assert facts["fit"]["memory"] == facts["kv"]
    flags = dict(flag.split(" ") for flag in facts["flags"] if " " in flag)
    assert int(flags["--kv-cache-memory"]) == facts["kv"]
    assert int(flags["--max-num-seqs"]) == facts["load"]["sequences"]
    assert int(flags["--block-size"]) == facts["block_size"]
    text = shown("budget", *args)
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    assert f"{facts['fit']['users_decoding']:,} decoding requests" in words
    for line in facts["lines"]:
        assert f"{line['name']} " in words
        assert size(line["nbytes"]) in words
    assert all(flag in text for flag in facts["flags"])


def test_pipelines_only_where_they_are_needed() -> None:
    def stages(*args: str) -> int:
        return int(said("budget", *args)["topology"]["pp"])

    assert stages("Llama-3.1-70B", "--gpu", "8xH100", "--max-len", "128K") == 1
    assert stages("Llama-3.1-70B", "--gpu", "8xH100", "--pp", "2") == 2
    assert stages("Llama-3.1-70B", "--gpu", "8xH100", "--tp", "2", "--dp", "2") == 2
    assert stages("Llama-3.1-405B", "--gpu", "2x8xH100") == 2
    assert stages("Llama-3.1-70B", "--gpu", "6xA100") > 1


def test_the_flags_can_be_pasted() -> None:
    text = shown("budget", "Llama-3.1-70B", "--gpu", "4xH100")
    pasted = text[text.index("vllm serve") :].splitlines()
    assert all(line.endswith("\\") for line in pasted[:-1])
    assert not pasted[-1].endswith("\\")
    assert "--tensor-parallel-size 4" in pasted[1]


def test_the_overhead_of_a_plan_can_be_that_of_the_budget() -> None:
    facts = said("budget", "Qwen3-8B", "--gpu", "H100")
    planned = said("plan", "Qwen3-8B", "--gpu", "H100", "--overhead", "auto")
    (fitted,) = said("fit", "Qwen3-8B", "--gpu", "H100", "--overhead", "auto")["fits"]
    assert planned["memory"] == fitted["memory"] == facts["kv"]
    assert planned["gpu"]["overhead"] == facts["overhead"]


def test_a_model_that_does_not_fit_is_refused() -> None:
    result = kvatlas("budget", "DeepSeek-V3.2", "--gpu", "8xH100")
    assert result.exit_code == 2
    assert "leave no memory for a cache" in " ".join(result.stderr.split())
    result = kvatlas("budget", "Qwen3-8B", "--gpu", "H100", "--release", "newest")
    assert result.exit_code == 2
    assert "must be a version number" in result.stderr
