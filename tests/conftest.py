import os
from pathlib import Path

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
    settings.register_profile("fast", max_examples=15, deadline=None)
    settings.register_profile("quick", max_examples=60, deadline=None)
    settings.register_profile(
        "deep", max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
