"""Let vLLM run plans of the policy `atlas`, which have smaller blocks for hybrid models.

vLLM loads `kvatlas.engines.vllm_plugin` in every process. The environment variable `KVATLAS_PLAN`
switches the planner on. With the value `atlas`, the planner selects the smallest block size at
which its plan fits at least 99% of the requests that vLLM's plan fits. With `atlas,pack=4`, a page
holds either four attention layers or one recurrent state. Without the variable, this module is not
imported.

The engine core makes two configs, vLLM's own and one with the groups of the plan, and logs one line
with both. If the plan is refused, or if fewer requests fit in it, vLLM's own config is used, and
the line has the reason.
"""

from __future__ import annotations

from kvatlas.engines.vllm.planner_hooks import PlannerSetting, refuse_release


def install_planner(text: str) -> None:
    """Switch the planner on in this process; `text` is the value of `KVATLAS_PLAN`."""
    setting = PlannerSetting.read(text)
    if not setting.on:
        return
    import vllm

    release = "_".join(vllm.__version__.split(".")[:2])
    if release == "0_32":
        from kvatlas.engines.vllm.planner_0_32 import replace_functions
    elif release == "0_33":
        from kvatlas.engines.vllm.planner_0_33 import replace_functions
    else:
        raise refuse_release(f"vLLM {vllm.__version__}")
    replace_functions(setting)
