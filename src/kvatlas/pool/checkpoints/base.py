"""`Checkpoints`: the block ends from which later requests can continue.

Full attention keeps every block, so a request can continue after any of them. A recurrent layer can
continue only where a copy of its state was kept, and a window only where its last blocks were kept.
A checkpoint consists of all states and window blocks that a request needs to continue at one block
end. Checkpoints cost memory, so a policy decides which to keep.
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
    """The input of checkpoint policies. All fields except `block` are in blocks, not tokens."""

    block: int
    """Number of tokens per block."""
    hit: int
    """Number of leading blocks that are cached and need not be computed."""
    seen: int
    """Length of the longest prefix shared with an earlier request."""
    end: int
    """Length of the prefix that later requests can share. A trace may have no id for the rest."""
    stop: int
    """Number of complete blocks of the prompt."""
    attention: int = 0
    """Length of the longest prefix that full attention has cached."""
    resend: int = 0
    """The last block end before the prompt's last token, where the same prompt could continue if
    it were sent again."""


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Base class of checkpoint policies."""

    share: float | None = None
    """Maximum share of the memory that checkpoints may take; None for no limit."""
    asks_for_seen: ClassVar[bool] = False
    """Whether the policy uses `Prompt.seen`."""

    def __post_init__(self) -> None:
        if self.share is not None and not 0 < self.share < 1:
            raise AtlasError(
                Code.BAD_SIZE,
                "The share of the memory for checkpoints must be greater than 0 and less than 1",
                got=f"share={self.share}",
                hint="Pass share=0.25, for example, or a policy name that ends with -within-25",
            )

    def positions(self, prompt: Prompt) -> Positions:
        """Return the positions of checkpoints; position n is after the first n blocks.

        They are ascending, greater than `prompt.hit` and at most `prompt.stop`.
        """
        raise NotImplementedError
