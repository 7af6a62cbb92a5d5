"""What is collected: vLLM's connector only where vLLM is, in an environment of its own."""

import gc
import os
from importlib.util import find_spec

_OF_VLLM = (
    "configured_tier.py",
    "connector.py",
    "connector_messages.py",
    "connector_stats.py",
    "published_events.py",
    "planner_0_32.py",
    "planner_0_33.py",
    "planner_core.py",
    "registered_caches.py",
)
# Tests run in several processes, on small tensors: further threads of OpenMP would only wait for
# each other, which took most of the time of the kernels' tests. vLLM counts its threads itself.
if find_spec("vllm") is None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
collect_ignore = [
    f"src/kvatlas/engines/vllm/{name}" for name in _OF_VLLM if find_spec("vllm") is None
]


def pytest_collection() -> None:
    """Import everything without looking for garbage meanwhile."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exclude what was imported from garbage collection.

    Tests that look for leaks collect garbage often, and modules such as torch have so many
    objects that each time took a third of a second.
    """
    gc.freeze()
    gc.enable()
