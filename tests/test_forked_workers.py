"""The plugin that runs tests in forked processes: each once, whatever happens to a process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.forked_workers import WAITING, Queue

ROOT = Path(__file__).parents[1]
TESTS = """
import os, warnings
import pytest

@pytest.fixture(scope="module")
def made():
    print("made")
    yield
    print("unmade")

@pytest.mark.parametrize("n", range(30))
def test_n(n, made):
    print("number", n)
    if n == 3:
        os._exit(7)
    if n == 5:
        warnings.warn("a warning", stacklevel=1)
    assert n != 11
"""


def run(folder: Path, *options: str) -> tuple[int, str]:
    """Run two files of tests; return the exit code and what is printed."""
    for name in ("test_one.py", "tests/wire/test_two.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.forked_workers", "--forked"]
    command += ["--rootdir", str(folder), "-p", "no:cacheprovider", "-vv", *options, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_each_test_is_reported_once_and_the_end_of_a_process_is_a_failure(tmp_path: Path) -> None:
    code, printed = run(tmp_path)
    assert code == 1
    outcomes = re.findall(r"(test_\w+\.py)::test_n\[(\d+)\] (PASSED|FAILED)", printed)
    assert len(outcomes) == len(set(outcomes)) == 2 * 30
    assert {(int(n), how) for _, n, how in outcomes if how == "FAILED"} == {
        (3, "FAILED"),
        (11, "FAILED"),
    }
    assert printed.count("The process of this test ended with 7.") > 0
    assert printed.count("UserWarning: a warning") == 2
    assert printed.count("number 11") == 2, "what a test prints is shown where it fails"
    assert "4 failed, 56 passed, 2 warnings" in printed


def test_all_pass_or_the_first_failure_ends_the_run(tmp_path: Path) -> None:
    assert run(tmp_path, "-k", "not 3 and not 11")[0] == 0
    code, printed = run(tmp_path, "-x", "-k", "not 3")
    assert code == 1
    assert "1 failed" in printed


def test_workers_take_all_batches_and_keep_to_files() -> None:
    waiting = f"{WAITING[0]}test_a.py"
    queue = Queue([waiting] * 30 + ["tests/test_b.py"] * 20 + ["tests/test_c.py"] * 2)
    taken, file = [], ""
    for _ in range(2):
        file, batch = queue.take(file, waiting=False)
        taken.append((file, len(batch)))
    assert taken == [("tests/test_b.py", 12), ("tests/test_b.py", 8)]
    file, batch = queue.take("", waiting=True)
    assert file == waiting
    queue.put_back(file, batch[5:])
    left = []
    while True:
        file, batch = queue.take(file, waiting=False)
        if not batch:
            break
        left += [(file, number) for number in batch]
    assert sorted(left) == [(waiting, n) for n in range(5, 30)] + [
        ("tests/test_c.py", 50),
        ("tests/test_c.py", 51),
    ]
