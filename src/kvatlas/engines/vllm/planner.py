"""Let vLLM run plans of policy atlas: small blocks for hybrid models.

vLLM loads `install` through the entry point group `vllm.general_plugins`, in every process. The
environment variable `KVATLAS_PLAN` switches the planner on: `atlas` plans the smallest blocks that
fit 99% of the requests of vLLM's plan, `atlas,pack=4` packs this many attention layers per state.
Without the variable nothing is changed.

The engine core makes two configs, vLLM's own and one with the groups of the plan, and logs one line
with both. If the plan is refused or fits fewer requests, vLLM's own config is used, and the line
has the reason.
"""

from __future__ import annotations

import os

from kvatlas.engines.vllm.planner_hooks import SETTING, PlannerSetting, refuse_release


def install() -> None:
    """Switch the planner on in this process if `KVATLAS_PLAN` asks for it; vLLM calls this."""
    setting = PlannerSetting.read(os.environ.get(SETTING))
    if not setting.on:
        return
    import vllm

    release = ".".join(vllm.__version__.split(".")[:2])
    if release != "0.32":
        raise refuse_release(f"vLLM {vllm.__version__}")
    from kvatlas.engines.vllm.planner_0_32 import install_planner

    install_planner(setting)
