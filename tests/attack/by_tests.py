"""Claims that tests of the wire and of the tier attack already: those tests, again and again."""

from __future__ import annotations

from collections.abc import Callable
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


def holds_in(*tests: str) -> Callable[[Attack], Outcome]:
    """A claim that holds where tests pass, each by its file and name; their cases are tries."""

    def claim(attack: Attack) -> Outcome:
        outcome = Outcome()
        names = [str(ROOT / test) for test in tests]
        for _ in range(max(1, attack.tries // 25)):
            quietly = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--tb=no"]
            code = pytest.main([*quietly, *names], plugins=[_Counting(outcome)])
            if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
                outcome.add([f"pytest ended with {code.name if code in pytest.ExitCode else code}"])
        return outcome

    return claim
