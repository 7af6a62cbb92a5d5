import os

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET", "0") != "0":
    collect_ignore_glob = ["test_*.py"]
