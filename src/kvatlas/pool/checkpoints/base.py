"""`Checkpoints`: the block ends at which a request keeps what later requests can start from.

Full attention keeps every block and can continue anywhere. A recurrent layer can continue only
where a copy of its state was kept, and a window only where its last blocks were kept. A checkpoint
is both. Checkpoints cost memory, so a policy decides which to keep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError, Code

Positions = NDArray[np.int64]


class Prompt(msgspec.Struct, frozen=True):
    """The facts about a prompt by which checkpoints are chosen. All but `block` count blocks."""

    block: int
    """Number of tokens per block."""
    hit: int
    """Number of blocks that need not be computed."""
    seen: int
    """The longest prefix that an earlier request shares."""
    end: int
    """The last position that is known to be comparable with later requests."""
    stop: int
    """Number of complete blocks of the prompt."""
    attention: int | None = None
    """The longest cached prefix of layers that keep every block; None if unknown."""
    resend: int | None = None
    """The last position from which the same prompt can continue if it is sent again."""


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Base class of checkpoint policies."""

    share: float | None = None
    """Maximum share of the memory that checkpoints may take; None for no limit."""
    asks_for_seen: ClassVar[bool] = False
    """Whether the policy uses `Prompt.seen`."""

    def __post_init__(self) -> None:
        if self.share is not None and not 0 < self.share < 1:
            problem = "The share of checkpoints is out of range"
            hint = "Use a share between 0 and 1"
            raise AtlasError(Code.BAD_SIZE, problem, got=f"a share of {self.share}", hint=hint)

    def positions(self, prompt: Prompt) -> Positions:
        """Return the block ends at which to keep a checkpoint, ascending, in hit + 1 .. stop."""
        raise NotImplementedError
