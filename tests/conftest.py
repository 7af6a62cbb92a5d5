import os

from hypothesis import HealthCheck, settings

settings.register_profile("quick", max_examples=200, deadline=None)
settings.register_profile(
    "deep", max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
