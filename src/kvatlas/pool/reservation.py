"""`Reservation`: the blocks that an engine must zero and copy before it computes tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import integer


class CopyOnWrite(NamedTuple):
    """A block to copy before the next tokens are computed.

    The source must not be changed, because it has other owners or other requests can find it.
    """

    group: int
    source: int
    destination: int
    tokens: int
    """Number of leading tokens of the block to copy. The rest need not be copied."""


@dataclass
class Reservation:
    """The work that an engine must do before it computes the reserved tokens."""

    clear: dict[int, list[int]] = field(default_factory=dict)
    """Blocks to zero, by group, because kernels read parts of them that were never written."""
    copies: list[CopyOnWrite] = field(default_factory=list)
    """Blocks to copy."""


def checked_tokens(tokens: int, computed: int, reserved: int, known: int) -> int:
    """Return `tokens`, the new number of computed tokens of a request, after checking it.

    It must be at least `computed`, the old number. It must be at most `reserved`, the number of
    tokens with blocks, and at most `known`, the number of tokens with token ids.
    """
    tokens = integer(tokens, "the number of tokens")
    if tokens < computed:
        problem = f"The number of computed tokens must not decrease; it is {computed}"
        hint = "Pass the total number of computed tokens"
    elif tokens > known:
        problem = f"The request has only {known} tokens"
        hint = "Pass the ids of tokens after the prompt as `new`"
    elif tokens > reserved:
        problem = f"Only {reserved} tokens are reserved"
        hint = "Call reserve before the tokens are computed"
    else:
        return tokens
    raise AtlasError(Code.BAD_TOKENS, problem, got=f"{tokens} tokens", hint=hint)
