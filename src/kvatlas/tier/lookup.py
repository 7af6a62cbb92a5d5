"""What a tier has of a request: how much of it, and the rows, held fast while they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvatlas.planning import Plan
from kvatlas.routing import Copy, checked_rank
from kvatlas.tier.index import Books, Row
from kvatlas.tier.keys import Need, Spans
from kvatlas.wire import copy_pools, rank_pools, stream_bytes

if TYPE_CHECKING:
    from kvatlas.tier.tier import Tier

Carry = Callable[[Sequence[Copy]], None]
"""Carries copies out, by any transport, and returns when all bytes are there."""


def longest(
    books: Books, spans: Spans, start: int, stop: int, keys: Mapping[int, Sequence[bytes | None]]
) -> int:
    """The most tokens that every group has what it needs for; 0 where that is none."""
    step: int = spans.step
    ends: list[int] = [stop, *range((stop - 1) // step * step, start, -step)]
    groups = range(len(spans.tier.groups))
    # Groups that need everything say how far it can be at most.
    for group in spans.keeping_all:
        for need in spans.of_group(group, start, stop, keys.get(group, ())):
            if books.find(need) is None:
                begin = need.entry * spans.tier.groups[group].block
                ends = [end for end in ends if end <= begin]
                break
    others = [group for group in groups if group not in spans.keeping_all]
    for end in ends:
        needs = (n for g in others for n in spans.of_group(g, start, end, keys.get(g, ())))
        if all(books.find(need) is not None for need in needs):
            return end
    return 0


class Held:
    """Rows of a tier that stay as they are until they are released."""

    def __init__(
        self, tier: Tier, start: int, tokens: int, needs: list[Need], rows: list[Row]
    ) -> None:
        self.start, self.tokens = start, tokens
        # How many tokens of the request, from its first, can be loaded; 0 for none.
        self._tier, self._needs, self._rows = tier, needs, rows

    def load(
        self,
        pools: Mapping[int, Any] | None,
        plan: Plan,
        *,
        rank: int = 0,
        blocks: Any,
        carry: Carry | None = None,
    ) -> None:
        """Fill one rank's blocks, as routes take them."""
        tier = self._tier
        with tier._using():
            rank = checked_rank(plan, rank, "destination")
            copies = self.copies(plan, rank=rank, blocks=blocks)
            with tier.metrics.phase("load"):
                if carry is None:
                    copy_pools(copies, tier.pools, rank_pools(plan, rank, pools or {}))
                else:
                    carry(copies)
            tier.metrics.add(loaded_bytes=stream_bytes(copies), descriptors=sum(map(len, copies)))

    def copies(self, plan: Plan, *, rank: int = 0, blocks: Any) -> tuple[Copy, ...]:
        """The byte ranges from `tier.memory` to a rank's pools, for any transport."""
        way = self._tier._route_to(plan)
        if not self.tokens or 0 not in way.sources(rank):
            return ()
        with self._tier.metrics.phase("bind"):
            return way.bind(
                src_rank=0,
                dst_rank=rank,
                src_blocks=self._tables(),
                dst_blocks=blocks,
                tokens=(self.start, self.tokens),
            ).copies

    def release(self) -> None:
        """Let the rows go; a second call does nothing."""
        rows, self._rows = self._rows, []
        self._tier._books.unpin(rows)

    def _tables(self) -> dict[int, Any]:
        """Rows by group; entries that nobody needs are no rows, and refused if somebody does."""
        groups = self._tier.plan.groups
        tables: dict[int, Any] = {group: [-1] for group in range(len(groups))}
        for need, row in zip(self._needs, self._rows, strict=True):
            table = tables[need.group]
            if groups[need.group].kind == "mamba":
                table[0] = row.number
                continue
            table += [-1] * (need.entry + 1 - len(table))
            table[need.entry] = row.number
        return tables
