"""What is collected: vLLM's connector only where vLLM is, in an environment of its own."""

from importlib.util import find_spec

_OF_VLLM = (
    "configured_tier.py",
    "connector.py",
    "connector_stats.py",
    "published_events.py",
    "registered_caches.py",
)
collect_ignore = [
    f"src/kvatlas/engines/vllm/{name}" for name in _OF_VLLM if find_spec("vllm") is None
]
