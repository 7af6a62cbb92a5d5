"""The interface of the core is the recorded one: `tests/golden/core_api.py` records it anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvatlas import planning
from tests.golden.core_api import CORE, public_interface

RECORDED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "core_api.json").read_text()
)
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "core.md"


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    return public_interface()


@pytest.mark.parametrize("package", CORE)
def test_the_interface_of_a_package_is_the_recorded_one(
    found: dict[str, dict[str, Any]], package: str
) -> None:
    now, before = found[package], RECORDED[package]
    assert sorted(now) == sorted(before), "public names that came or went"
    changed = {name: (before[name], now[name]) for name in now if now[name] != before[name]}
    assert not changed


def test_a_renamed_parameter_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def renamed(specification: object) -> None:
        """Stand in for a function whose parameter had another name."""

    monkeypatch.setattr(planning, "padding", renamed)
    assert public_interface()["planning"]["padding"] != RECORDED["planning"]["padding"]


def test_the_page_of_the_core_lists_each_public_name() -> None:
    rows = {
        row.split("|")[1].strip(" `"): row.split("|")[2]
        for row in PAGE.read_text().splitlines()
        if row.startswith("| `")
    }
    listed = {package: sorted(cell.replace("`", "").split()) for package, cell in rows.items()}
    assert listed == {package: sorted(names) for package, names in RECORDED.items()}
