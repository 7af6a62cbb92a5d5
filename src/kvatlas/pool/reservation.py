"""`Reservation`: what an engine zeroes and copies before it computes tokens, and which it may."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import integer


class CopyOnWrite(NamedTuple):
    """A block to copy before the next tokens are computed: another owner keeps the old one."""

    group: int
    source: int
    destination: int
    tokens: int
    """Tokens of it that are the request's: the rest of the block need not be copied."""


@dataclass
class Reservation:
    """What an engine does before it computes the tokens that were reserved for."""

    clear: dict[int, list[int]] = field(default_factory=dict)
    """Blocks to zero first, by group: those that the plan says are read before they are written."""
    copies: list[CopyOnWrite] = field(default_factory=list)
    """Blocks to copy."""


def checked_tokens(tokens: int, computed: int, reserved: int, known: int) -> int:
    """How many tokens of a request are computed now, or a refusal."""
    tokens = integer(tokens, "the tokens")
    if not computed <= tokens <= min(reserved, known):
        problem = "Tokens are computed in order, and in blocks that were reserved"
        got = f"{tokens} tokens after {computed}, of {known} known and {reserved} reserved"
        raise AtlasError(Code.BAD_TOKENS, problem, got=got, hint="Reserve first")
    return tokens
