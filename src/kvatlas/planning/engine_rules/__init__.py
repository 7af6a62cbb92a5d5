"""Rules of engines as data: one table per release of vLLM, with conditions on the chip.

A new release needs one module in this package and the recorded plans of vLLM
(`make record-vllm`).
"""

from __future__ import annotations

from kvatlas.errors import AtlasError, Code
from kvatlas.planning.engine_rules import vllm_0_31, vllm_0_32, vllm_0_33
from kvatlas.planning.engine_rules.chips import CHIPS, RECORDED, checked_chip, chip_of
from kvatlas.planning.engine_rules.rule_types import (
    BackendChoice,
    EngineRules,
    PrefillCheckpoint,
)

__all__ = [
    "CHIPS",
    "NEWEST",
    "RECORDED",
    "RELEASES",
    "BackendChoice",
    "EngineRules",
    "PrefillCheckpoint",
    "checked_chip",
    "chip_of",
    "split_policy",
]

RELEASES = {module.RULES.version: module.RULES for module in (vllm_0_31, vllm_0_32, vllm_0_33)}
"""The rules of each known release of vLLM, the oldest first."""
NEWEST = next(reversed(RELEASES.values()))


def split_policy(policy: str) -> tuple[str, EngineRules]:
    """Return (name, rules of the release) of a policy such as `vllm@0.32`.

    Without a release, the newest is used.

    >>> name, rules = split_policy("vllm@0.32")
    >>> name, rules.version, split_policy("vllm")[1].version
    ('vllm', '0.32', '0.33')
    """
    name, given, version = policy.partition("@")
    if not given:
        return name, NEWEST
    # 0.32.0 and 0.32.1 have the rules of 0.32.
    rules = RELEASES.get(".".join(version.split(".")[:2]))
    if rules is None or not version.replace(".", "").isdigit():
        hint = f"Use one of {', '.join(f'{name}@{known}' for known in RELEASES)}"
        problem = "The rules of this release of vLLM are not known"
        raise AtlasError(Code.UNKNOWN_POLICY, problem, got=repr(policy), hint=hint)
    return name, rules
