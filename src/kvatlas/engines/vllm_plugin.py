"""The entry point that vLLM loads in every process (group `vllm.general_plugins`).

This module imports nothing unless the environment variable `KVATLAS_PLAN` is set, so that an
installed kvatlas does not slow down vLLM.
"""

from __future__ import annotations

import os


def install() -> None:
    """Switch the planner on in this process if `KVATLAS_PLAN` is set.

    >>> install()
    """
    if setting := os.environ.get("KVATLAS_PLAN"):
        from kvatlas.engines.vllm.planner import install_planner

        install_planner(setting)
