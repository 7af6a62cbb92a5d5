"""The guarantees of transports are those in the guide to security."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kvatlas.wire.transports.access import Guarantees
from kvatlas.wire.transports.registry import _CLASSES
from tests.wire.transports.conftest import skip_without
from tests.wire.transports.ends import KINDS, OVER_TCP, Kind

PAGE = Path(__file__).parents[3] / "docs/how-to/security.md"


def documented() -> dict[str, Guarantees]:
    """The table of the page: a cell that begins with "none" is no guarantee."""
    _, _, rest = PAGE.read_text().partition("## Guarantees of a transport")
    rows = [line.strip("|").split("|") for line in rest.splitlines() if line.startswith("| `")][:8]
    return {
        name.strip(): Guarantees(*(not cell.strip().startswith("none") for cell in cells))
        for name, _, *cells in rows
    }


@pytest.mark.parametrize("name", [name for name in _CLASSES if name != "nixl"])
def test_the_page_has_the_guarantees_of_a_transport(name: str) -> None:
    module = import_module(f"kvatlas.wire.transports.{name}")
    kind: Any = getattr(module, _CLASSES[name])
    assert documented()[f"`{name}`"] == kind.guarantees


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        (KINDS[2], "`nixl` on one host (CMA)"),
        (OVER_TCP, "`nixl` over TCP (`over_tcp=True`)"),
    ],
    ids=["cma", "tcp"],
)
def test_the_guarantees_of_nixl_depend_on_its_device(
    kind: Kind, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without(kind)
    from kvatlas.wire.transports.nixl_agents import Agents

    for name, value in kind.settings.items():
        monkeypatch.setenv(name, value)
    agents = Agents("DRAM", "UCX", "lo", **kind.options)
    assert documented()[row] == agents.guarantees
    assert documented()["`nixl` over RDMA"] == Guarantees(authentication=True)
