"""The rows of a batch: their padding, their block tables, and how their pages are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvatlas.engines.transformers.block_tables import Table
from kvatlas.errors import AtlasError, Code


class Batch:
    """What all layers of a cache share."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = tuple(tables)
        self.rows = 0
        self.skipped: list[int] = []
        """Padding on the left of each row, which is not stored."""
        self._paged: tuple[int, int] | None = None

    def admit(self, count: int) -> None:
        """Rows for a batch of `count`, or a refusal if there are others."""
        if self.rows == count:
            return
        if self.rows:
            raise AtlasError(
                Code.BAD_TENSOR,
                "A cache goes on with the rows that it began with",
                got=f"a batch of {count} after one of {self.rows}",
                hint="Use reset, batch_select_indices or batch_repeat_interleave between them",
            )
        self._require({table: count for table in self.tables if table.recurrent})
        for table in self.tables:
            table.admit(count, padded=self._paged is None)
        self.rows = count
        if len(self.skipped) != count:
            self.skipped = [0] * count

    def clear(self) -> None:
        """No rows."""
        for table in self.tables:
            table.clear()
        self.rows, self.skipped, self._paged = 0, [], None

    def select(self, indices: torch.Tensor) -> None:
        """Rows by their old numbers, or by a mask over them."""
        chosen = torch.arange(self.rows)[indices.cpu()].tolist()
        self._require({table: table.copies(chosen) for table in self.tables})
        for table in self.tables:
            table.select(chosen)
        self.skipped = [self.skipped[i] for i in chosen]
        self.rows = len(chosen)
        if not chosen:
            self.clear()

    def _require(self, needs: Mapping[Table, int]) -> None:
        """Refuse what some pool has too few blocks for, before any table changes."""
        pools = {id(table.blocks): table.blocks for table in needs}
        for key, blocks in pools.items():
            blocks.require(sum(n for table, n in needs.items() if id(table.blocks) == key))

    # -- how pages are read ---------------------------------------------------------

    def read_pages(self, mask: torch.Tensor | None, rows: int, start: int, count: int) -> None:
        """Attention will read the pages for `count` tokens behind `start`.

        `mask` [rows, tokens] tells padding apart, which is then not stored.
        """
        self._paged = (start, count)
        skipped = [0] * rows if mask is None else (mask.cumsum(-1) == 0).sum(-1).tolist()
        if start == 0 and not self.rows:
            self.skipped = skipped
        same = self.skipped == skipped or mask is None
        inner = mask is not None and not bool(_stored(mask, skipped, start, count).all())
        if not same or inner:
            raise AtlasError(
                Code.ENGINE_REFUSES,
                "Pages are read where padding is on the left of the first tokens, and not stored",
                got="padding elsewhere, or padding that was stored by another attention",
                hint="Use attn_implementation sdpa or eager from the first token on",
            )

    def reads_pages(self, start: int, count: int) -> bool:
        """Whether these are the tokens for which attention said it reads the pages."""
        return self._paged == (start, count)


def _stored(mask: torch.Tensor, skipped: Sequence[int], start: int, count: int) -> torch.Tensor:
    """The mask over new tokens, with padding on the left taken for granted."""
    at = torch.arange(start, start + count, device=mask.device)
    left = at < torch.tensor(skipped, device=mask.device).unsqueeze(1)
    return mask[:, start : start + count].bool() | left


def cannot_take_back(what: str) -> AtlasError:
    """A refusal to go back to fewer tokens."""
    return AtlasError(
        Code.CANNOT_TAKE_BACK,
        "Tokens are taken back while everything is there that the last of them saw",
        got=what,
        hint="Begin again with reset, or keep what a window leaves with activate_past_recording",
    )


def not_planned() -> AtlasError:
    """A refusal to keep what has no page."""
    return AtlasError(
        Code.ENGINE_REFUSES,
        "What a decoder layer keeps has a page in the plan",
        got="a layer that the plan has no page for",
        hint="Plan from the config of the model that runs",
    )
