"""`kvatlas move` and `bench wire`: real processes, every byte compared."""

from __future__ import annotations

import json

import pytest

from tests.cli.helpers import kvatlas, process


@pytest.mark.parametrize(
    ("source", "target", "how"),
    [("tp=2,layout=LBNHC", "layout=BHLNC,block-size=32", "auto"), ("", "tp=2,pp=2", "direct")],
)
def test_every_byte_arrives(source: str, target: str, how: str) -> None:
    ends = ("--from", source, "--to", target, "--tokens", "48", "--how", how)
    result = process("move", "Qwen3-8B", *ends, "--transport", "shm", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["transport"] == "shm"
    assert sum(rank["nbytes"] for rank in found["ranks"]) == 48 * 36 * 8 * 2 * 128 * 2
    assert all(rank["wrong"] == 0 for rank in found["ranks"])


def test_a_table_for_people() -> None:
    result = process("move", "Qwen3-8B", "--to", "tp=2", "--tokens", "16", "--transport", "shm")
    assert result.returncode == 0, result.stderr
    assert "Every byte arrived over shm, and no other was touched." in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("move", "Qwen3-8B", "--how", "sideways"), "auto, direct or staged"),
        (("move", "Qwen3-8B", "--transport", "pigeon", "--tokens", "16"), "wire_failed"),
        (("move", "Qwen3-8B", "--to", "kv-dtype=fp8", "--tokens", "16"), "unlike_dtypes"),
        (("move", "no-such-model"), "unknown_model"),
        (("bench", "nothing"), "only wire"),
    ],
)
def test_refusals(arguments: tuple[str, ...], words: str) -> None:
    result = kvatlas(*arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
    assert "Traceback" not in result.output
