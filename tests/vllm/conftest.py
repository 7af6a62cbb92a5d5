"""Real engines: nothing here is run where vLLM is not installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.comparing import Undisturbed
from tests.vllm.verdicts import Verdicts

_NEED_VLLM = [
    "test_engine*.py", "test_describe.py", "test_event_traces.py", "test_hit_rates.py",
    "test_interface.py", "test_offload.py", "kv_cache_configs.py", "made_up_groups.py",
    "misplaced_pages.py", "overlapping_pages.py", "planning_functions.py", "preloaded.py",
    "sleeping_workers.py", "vendor_platform.py",
]  # fmt: skip
collect_ignore_glob = [] if find_spec("vllm") else _NEED_VLLM

_VERDICTS = pytest.StashKey[Verdicts]()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def right(checkpoints: Path) -> Undisturbed:
    """What an engine without any connector answers."""
    return Undisturbed(checkpoints)


@pytest.fixture(scope="session")
def verdicts(pytestconfig: pytest.Config) -> Verdicts:
    """What is printed when all tests have run."""
    return pytestconfig.stash.setdefault(_VERDICTS, Verdicts())


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    found = config.stash.get(_VERDICTS, None)
    if found is not None and found.found:
        terminalreporter.write("\n" + found.table())
