"""Checkpoint policies: where recurrent states and windows are kept. One policy per module."""

from kvatlas.errors import AtlasError, Code
from kvatlas.pool.checkpoints.base import Checkpoints, Positions, Prompt
from kvatlas.pool.checkpoints.branch_points import BranchPoints
from kvatlas.pool.checkpoints.combined import Combined
from kvatlas.pool.checkpoints.every_block import EveryBlock
from kvatlas.pool.checkpoints.every_tokens import EveryTokens
from kvatlas.pool.checkpoints.prompt_end import PromptEnd
from kvatlas.pool.checkpoints.vllm_default import VllmDefault

CHECKPOINTS = ("every-block", "prompt-end", "branch-points", "vllm-default", "every-2048")
"""Names of policies on the command line. `every-2048` stands for any number of tokens."""


def checkpoint_policy(name: str) -> Checkpoints:
    """Return the policy of this name.

    The suffix `-within-25` limits checkpoints to 25% of the memory. A plus sign joins policies:
    `vllm-default+every-128` keeps the checkpoints of both.

    >>> checkpoint_policy("every-4096"), checkpoint_policy("prompt-end-within-25").share
    (EveryTokens(share=None, tokens=4096), 0.25)
    """
    text, _, limit = name.partition("-within-")
    kinds = {
        "every-block": EveryBlock,
        "prompt-end": PromptEnd,
        "branch-points": BranchPoints,
        "vllm-default": VllmDefault,
    }
    words, number = text.rpartition("-")[::2]
    bad = bool(limit) and not limit.isdecimal()
    share = int(limit) / 100 if limit and not bad else None
    if "+" in text and not bad:
        return Combined(parts=tuple(map(checkpoint_policy, text.split("+"))), share=share)
    if text in kinds and not bad:
        return kinds[text](share=share)
    if words == "every" and number.isdecimal() and not bad:
        return EveryTokens(tokens=int(number), share=share)
    hint = f"Use one of {', '.join(CHECKPOINTS)}, optionally with a suffix such as -within-25"
    problem = "There is no such checkpoint policy"
    raise AtlasError(Code.UNKNOWN_POLICY, problem, got=repr(name[:60]), hint=hint)


__all__ = [
    "CHECKPOINTS",
    "BranchPoints",
    "Checkpoints",
    "Combined",
    "EveryBlock",
    "EveryTokens",
    "Positions",
    "Prompt",
    "PromptEnd",
    "VllmDefault",
    "checkpoint_policy",
]
