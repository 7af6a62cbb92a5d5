"""`RowLookup`: find the longest stored prefix of a request with few calls to the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from kvatlas.tier.namespaces import RowName
from kvatlas.tier.request_blocks import Cover, KeysByGroup, NeededBlock, TierSpans
from kvatlas.tier.row_traffic import RowTraffic
from kvatlas.tier.store_calls import Deadline

_ENDS_AT_ONCE = 64
"""Number of possible ends of a request in one lookup."""


class FoundRows(NamedTuple):
    """A stored prefix of a request: its length in tokens, its rows, and why it is not longer."""

    tokens: int
    rows: Mapping[NeededBlock, RowName]
    missing: str
    """"absent" if longer prefixes do not exist, or "incomplete" if a row lacks some objects."""


class RowLookup:
    """Looks up which rows of a request exist in a store. A row is one block of the tier."""

    def __init__(self, traffic: RowTraffic, spans: TierSpans) -> None:
        self._traffic, self._spans = traffic, spans

    def longest(self, start: int, stop: int, keys: KeysByGroup, deadline: Deadline) -> FoundRows:
        """Find the longest stored prefix of a request's first `stop` tokens.

        Rows that are needed only for tokens before `start` are not looked up.
        """
        asked = Asked(self._traffic, self._spans, deadline)
        end = self._spans.longest(start, stop, keys, asked.stored, at_once=_ENDS_AT_ONCE)
        needs = self._spans.needs(start, end, keys)
        return FoundRows(end, {need: asked.rows[need] for need in needs}, asked.missing)

    def kept(
        self, group: int, ends: Sequence[tuple[int, bytes]], deadline: Deadline, *, whole: bool
    ) -> list[bool]:
        """Return, for each prefix in `ends`, whether a group stores the row of its last block.

        A prefix of a request is given as (length, key): its number of tokens, and the key of its
        last block. With `whole`, all objects of the row must exist. Otherwise the first object
        suffices.
        """
        covers = [self._spans.covers_at_end(group, stop) for stop, _ in ends]
        rows = [
            RowName(group, key, cover)
            for (_, key), own in zip(ends, covers, strict=True)
            for cover in own
        ]
        traffic = self._traffic
        if whole:
            there = iter([all_there for all_there, _ in traffic.present(rows, deadline)])
        else:
            there = iter(traffic.begun(rows, deadline))
        return [any(list(islice(there, len(own)))) for own in covers]


class Asked:
    """Records which rows exist, from all lookups of one search."""

    def __init__(self, traffic: RowTraffic, spans: TierSpans, deadline: Deadline) -> None:
        self._traffic, self._spans, self._deadline = traffic, spans, deadline
        self.rows: dict[NeededBlock, RowName] = {}
        """The row that contains each found block."""
        self.missing = "absent"
        """Why rows are missing: "incomplete" if a row has some of its objects, else "absent"."""
        self._known: dict[RowName, bool] = {}

    def stored(self, needs: Sequence[NeededBlock]) -> list[bool]:
        """Return for each need whether the store has its row.

        Rows that were looked up before are not looked up again.
        """
        candidates = {need: self._candidates(need) for need in needs if need not in self.rows}
        unknown = dict.fromkeys(row for rows in candidates.values() for row in rows)
        new = [row for row in unknown if row not in self._known]
        for row, (whole, begun) in zip(
            new, self._traffic.present(new, self._deadline), strict=True
        ):
            self._known[row] = whole
            if begun and not whole:
                self.missing = "incomplete"
        for need, rows in candidates.items():
            found = next((row for row in rows if self._known[row]), None)
            if found is not None:
                self.rows[need] = found
        return [need in self.rows for need in needs]

    def _candidates(self, need: NeededBlock) -> list[RowName]:
        """Return the names of the rows that can serve `need`.

        One row contains the whole block, the other only the needed tokens. For a recurrent state,
        there is only one such row.
        """
        if need.key is None:
            return []
        exact = RowName(need.group, need.key, need.cover)
        if self._spans.recurrent(need.group):
            return [exact]
        block = self._spans.tier.groups[need.group].block
        whole = RowName(need.group, need.key, Cover(0, block))
        return [whole] if whole == exact else [whole, exact]
