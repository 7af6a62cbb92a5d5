"""What is collected: vLLM's connector only where vLLM is, in an environment of its own."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("vllm") else ["src/kvatlas/engines/vllm/connector.py"]
