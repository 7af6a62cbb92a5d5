"""Claims that tests of the wire and of the tier attack already: those tests, again and again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.attack.claims import Attack, Outcome

ROOT = Path(__file__).parents[2]


class _Counting:
    """Counts what pytest reports."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.outcome.add([f"{report.nodeid.rpartition('::')[2]}: {report.when} failed"])
        elif report.when == "call" and report.passed:
            self.outcome.add([])


@dataclass(frozen=True)
class PassingTests:
    """A claim that holds where tests pass, each by its file and name; their cases are tries."""

    tests: tuple[str, ...]

    def __call__(self, attack: Attack) -> Outcome:
        outcome = Outcome()
        names = [str(ROOT / test) for test in self.tests]
        quietly = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--tb=no"]
        for _ in range(max(1, attack.tries // 25)):
            code = pytest.main([*quietly, *names], plugins=[_Counting(outcome)])
            if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
                outcome.add([f"pytest ended with {code!r}"])
        return outcome


def holds_in(*tests: str) -> PassingTests:
    """The claim that some tests attack."""
    return PassingTests(tests)
