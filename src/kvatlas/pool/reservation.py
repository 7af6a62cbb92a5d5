"""`Reservation`: the blocks that an engine must zero and copy before it computes tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import integer


class CopyOnWrite(NamedTuple):
    """A block to copy before the next tokens are computed, because it has other owners."""

    group: int
    source: int
    destination: int
    tokens: int
    """Number of tokens of the block to copy. The rest is not needed."""


@dataclass
class Reservation:
    """The work that an engine must do before it computes the reserved tokens."""

    clear: dict[int, list[int]] = field(default_factory=dict)
    """Blocks to zero, by group: kernels read them before they have written all of them."""
    copies: list[CopyOnWrite] = field(default_factory=list)
    """Blocks to copy."""


def checked_tokens(tokens: int, computed: int, reserved: int, known: int) -> int:
    """Return the number of computed tokens of a request, or raise an error if it is invalid."""
    tokens = integer(tokens, "the tokens")
    if not computed <= tokens <= min(reserved, known):
        problem = "Computed tokens must not decrease, nor exceed the known or the reserved tokens"
        got = f"{tokens} tokens after {computed}, with {known} known and {reserved} reserved"
        hint = "Call reserve before the tokens are computed"
        raise AtlasError(Code.BAD_TOKENS, problem, got=got, hint=hint)
    return tokens
