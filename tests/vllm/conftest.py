"""Real engines: nothing here is run where vLLM is not installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

_NEED_VLLM = [
    "test_engine*.py", "test_describe.py", "test_interface.py", "test_offload.py", "preloaded.py",
]  # fmt: skip
collect_ignore_glob = [] if find_spec("vllm") else _NEED_VLLM


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")
