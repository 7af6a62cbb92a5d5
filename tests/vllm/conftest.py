"""Real engines: nothing here is run where vLLM is not installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore_glob = (
    []
    if find_spec("vllm")
    else ["test_engine*.py", "test_describe.py", "test_interface.py", "test_offload.py"]
)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")
