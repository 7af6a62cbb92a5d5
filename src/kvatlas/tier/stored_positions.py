"""The token positions at which a tier stores windows and recurrent states.

Full attention stores every block, so a later request can continue after any of them. A window or a
recurrent state serves only the position for which it was stored. The policies are those of the pool
(`kvatlas.pool.checkpoints`): to store at the end of the prompt, at the branch points of earlier
requests, or after every k tokens. The tier does not record earlier requests. It assumes that a
prompt branches off from an earlier request where the prompt's stored rows of full attention end.
"""

from __future__ import annotations

from kvatlas.pool import Checkpoints, checkpoint_policy
from kvatlas.pool.checkpoints import Prompt

FOR_WINDOWS = "vllm-default+every-128"
"""The default policy of models with windows: rows of nearby windows are shared, so it is cheap."""
FOR_STATES = "vllm-default"
"""The default policy of models with recurrent states, each of which is stored whole."""


def stored_positions(
    policy: Checkpoints, *, step: int, prompt: int, hit: int, attention: int
) -> list[int]:
    """Return, in ascending order, the token positions at which to store windows and states.

    `prompt` is the number of tokens of the prompt; its last token is always computed. `hit` is the
    number of leading tokens that need not be computed. `attention` is the number of leading tokens
    for which the tier has the rows of full attention. Positions are multiples of `step`.

    >>> policy = checkpoint_policy("vllm-default+every-128")
    >>> stored_positions(policy, step=64, prompt=300, hit=0, attention=192)
    [128, 192, 256]
    >>> stored_positions(policy, step=64, prompt=300, hit=192, attention=192)
    [256]
    """
    last = max(prompt - 1, 0) // step
    seen = min(attention // step, last)
    asked = Prompt(step, hit // step, seen, last, last, attention=seen, resend=last)
    return [int(one) * step for one in policy.positions(asked) if one * step > hit]


def default_policy(*, recurrent: bool) -> Checkpoints:
    """Return the default policy. `recurrent` is true for models with recurrent states."""
    return checkpoint_policy(FOR_STATES if recurrent else FOR_WINDOWS)
