"""Networks and sites for tests of hosts, and the table at the end of a run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from tests.hosts import namespaces
from tests.hosts.networks import Network
from tests.hosts.sites import Site, Way

_rows: list[tuple[str, str, str, float]] = []

MakeSite = Callable[[Network, Way], Site]
Note = Callable[[str], None]


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Note:
    """Add how a case ended to its row of the table."""
    return lambda outcome: record_property("outcome", outcome)


@pytest.fixture(scope="session", autouse=True)
def _namespaces() -> None:
    """Skip all tests where namespaces are not allowed. On CI that is a failure."""
    namespaces.sweep()
    if reason := namespaces.why_not():
        problem = f"tests between hosts cannot run: {reason}"
        if os.environ.get("CI") == "true":
            pytest.fail(problem, pytrace=False)
        pytest.skip(problem)


@pytest.fixture
def place() -> Iterator[MakeSite]:
    """Make a site on a network. Both end with the test."""
    made: list[Site] = []

    def make(network: Network, way: Way) -> Site:
        site = Site(network, way)
        made.append(site)
        return site

    try:
        yield make
    finally:
        try:
            for site in made:
                site.close()
        finally:
            for site in made:
                site.network.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report: pytest.TestReport = yield
    if report.when == "call" or report.outcome != "passed":
        found = dict(item.user_properties)
        given = getattr(item, "callspec", None)
        way = given.params.get("way") if given is not None else None
        transport = "-" if way is None else f"{way.transport}, {way.ranks} ranks"
        result = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        if "outcome" in found:
            result += f": {found['outcome']}"
        case = item.name.removeprefix("test_").replace("_", " ")
        _rows.append((case, transport, result, call.duration))
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not _rows:
        return
    table = Table("case", "transport", "result", "seconds", title="Transfers between hosts")
    table.columns[3].justify = "right"
    for case, transport, result, seconds in _rows:
        table.add_row(case, transport, result, f"{seconds:.1f}")
    table.caption = time.strftime("%H:%M:%S")
    Console(file=terminalreporter._tw._file, width=terminalreporter._tw.fullwidth).print(table)
