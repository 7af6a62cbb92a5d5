"""Networks and sites for tests of hosts, and the table at the end of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

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


@pytest.fixture(autouse=True)
def _row(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """Record the parameters of a case for its row of the table."""
    given = getattr(request.node, "callspec", None)
    parameters = {} if given is None else dict(given.params)
    way = parameters.pop("way", None)
    if way is not None:
        record_property("way", f"{way.transport}, tp {way.ranks}")
    shown = [getattr(value, "__name__", str(value)) for value in parameters.values()]
    record_property("about", ", ".join(shown))


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


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect a row of the table. With workers, this runs in the process that prints."""
    if report.when == "call" or report.outcome != "passed":
        found = dict(report.user_properties)
        result: str = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        if "outcome" in found:
            result += f": {found['outcome']}"
        case = report.nodeid.rpartition("::")[2].removeprefix("test_")
        case = case.partition("[")[0].replace("_", " ")
        if found.get("about"):
            case += f" ({found['about']})"
        _rows.append((case, str(found.get("way", "-")), result, report.duration))


def pytest_terminal_summary() -> None:
    if not _rows:
        return
    table = Table("case", "transport", "result", "seconds", title="Transfers between hosts")
    table.columns[3].justify = "right"
    for case, transport, result, seconds in sorted(_rows):
        table.add_row(case, transport, result, f"{seconds:.1f}")
    Console(width=120).print(table)
