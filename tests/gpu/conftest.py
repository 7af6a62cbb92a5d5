import os
from importlib.util import find_spec

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET", "0") != "0":
    collect_ignore_glob = ["test_*.py"]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the cases of a transport whose package is missing, as tests of the wires do."""
    values = getattr(item, "callspec", None)
    if values and "nixl" in values.params.values() and find_spec("nixl") is None:
        pytest.skip("nixl is not installed")
