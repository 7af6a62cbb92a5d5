"""Let vLLM run plans of policy atlas: small blocks for hybrid models.

vLLM loads `kvatlas.engines.vllm_plugin` in every process. The environment variable `KVATLAS_PLAN`
switches the planner on: `atlas` plans the smallest blocks that
fit 99% of the requests of vLLM's plan, `atlas,pack=4` packs this many attention layers per state.
Without the variable, this module is not imported.

The engine core makes two configs, vLLM's own and one with the groups of the plan, and logs one line
with both. If the plan is refused or fits fewer requests, vLLM's own config is used, and the line
has the reason.
"""

from __future__ import annotations

from kvatlas.engines.vllm.planner_hooks import PlannerSetting, refuse_release


def install_planner(text: str) -> None:
    """Switch the planner on in this process; `text` is the value of `KVATLAS_PLAN`."""
    setting = PlannerSetting.read(text)
    if not setting.on:
        return
    import vllm

    release = ".".join(vllm.__version__.split(".")[:2])
    if release != "0.32":
        raise refuse_release(f"vLLM {vllm.__version__}")
    from kvatlas.engines.vllm.planner_0_32 import replace_functions

    replace_functions(setting)
