import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

# They need root and minutes, so they have their own target: make test-hosts.
collect_ignore = ["hosts"]

# Triton asks once, when it is first imported, whether it is to interpret.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:  # a GPU machine where nothing can be installed: tests/gpu needs none
    pass
else:
    # The gate draws the same examples each time, so that a change is judged by what it changes.
    # Everywhere else examples are random, and explore further with each run.
    fixed: dict[str, Any] = {"derandomize": "CI" in os.environ, "deadline": None}
    if fixed["derandomize"]:
        fixed["database"] = None
    settings.register_profile("fast", max_examples=15, **fixed)
    settings.register_profile("quick", max_examples=40, **fixed)
    settings.register_profile(
        "deep", max_examples=10_000, suppress_health_check=[HealthCheck.too_slow], **fixed
    )
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[Any], list[Any]]:
    """Import a file for its doctests only if it has some: most helpers have none."""
    collectors = yield
    if ">>> " in file_path.read_text(errors="ignore"):
        return collectors
    return [one for one in collectors if type(one).__name__ != "DoctestModule"]
