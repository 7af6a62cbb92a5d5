"""Formats stay as recorded: `tests/golden/formats.py` has the command that records them anew."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.golden import formats

RECORDED: dict[str, Any] = json.loads(formats.RECORDED.read_text())


@pytest.mark.parametrize(
    "made",
    [
        formats.error_codes, formats.plans, formats.tier_file, formats.tier_objects,
        formats.messages,
    ],
)  # fmt: skip
def test_a_format_is_the_recorded_one(made: Callable[[], Any]) -> None:
    assert made() == RECORDED[made.__name__]


def test_the_keys_of_json_output_are_those_recorded(tmp_path: Path) -> None:
    assert formats.json_keys(tmp_path) == RECORDED["json_keys"]


def test_every_command_with_json_output_is_recorded() -> None:
    named = {name.partition(" (")[0] for name in RECORDED["json_keys"]}
    assert sorted(named) == formats.commands_with_json()
