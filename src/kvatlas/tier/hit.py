"""`Hit`: what a tier has of a request, pinned until it is released."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.routing import Copy, RunGrid
from kvatlas.routing.block_tables import checked_rank
from kvatlas.tier.converting import Converting, TierRoutes
from kvatlas.tier.index import TierBlock
from kvatlas.tier.request_blocks import NeededBlock
from kvatlas.tier.storage import Carry, TierStorage
from kvatlas.wire.memory_copy import is_on_gpu


@dataclass(eq=False, repr=False)
class Hit:
    """Tokens of a request that a tier has, in blocks that stay until it is released."""

    start: int
    tokens: int
    """How many tokens of the request, from its first, can be fetched; 0 for none."""
    _storage: TierStorage
    _routes: TierRoutes
    tables: Mapping[int, Any]
    """The tier's blocks by group; entries that nobody needs have none, and are refused if used."""
    _let_go: Callable[[], None]
    """Unpins the blocks; called once."""
    name: bytes = b""
    """What other clients of a served tier join it by."""
    _loaded: ExitStack = field(default_factory=ExitStack)
    """Ends the use of the tier's memory."""
    _released: bool = False

    def fetch(
        self,
        pools: Mapping[int, Any] | None,
        plan: Plan,
        *,
        rank: int = 0,
        blocks: Any,
        start: int | None = None,
        carry: Carry | None = None,
        convert: Converting | None = None,
    ) -> None:
        """Fill one rank's blocks, as routes take them; from token `start` on, where one is given.

        What a rank has of the tokens before stays as it is. With `convert`, what the rank
        keeps in another dtype is converted.
        """
        storage = self._storage
        with storage.using():
            rank = checked_rank(plan, rank, "destination")
            way = self._routes.to(plan, convert)
            if way.conversion is not None:
                if self.tokens and 0 in way.sources(rank):
                    _refuse_carry(carry)
                    stream = way.converted(**self._ends(rank, blocks, start))
                    storage.convert(stream.parts(), plan, rank, pools or {})
                return
            offload = None if carry else storage.offload_of_sums(plan, rank, pools)
            if offload is not None:
                grids = self._sums(plan, rank, blocks, start)
                storage.carry("fetch", grids, offload.fetch_sums)
                return
            if carry is None and storage.takes_sums(pools):
                grids = self._sums(plan, rank, blocks, start)
                storage.carry("fetch", grids, storage.reading(plan, rank, pools or {}))
                return
            copies = self._bound(plan, rank, blocks, start)
            if carry is not None or is_on_gpu(pools):
                storage.load(copies, self._loaded)
            storage.carry("fetch", copies, carry or storage.reading(plan, rank, pools or {}))

    def copies(self, plan: Plan, *, rank: int = 0, blocks: Any) -> tuple[Copy, ...]:
        """The byte ranges from `tier.memory` to a rank's pools, for any transport.

        Of a tier in a file, the bytes are there until the hit is released.
        """
        with self._storage.using():
            copies = self._bound(plan, rank, blocks)
            self._storage.load(copies, self._loaded)
            return copies

    def _bound(
        self, plan: Plan, rank: int, blocks: Any, start: int | None = None
    ) -> tuple[Copy, ...]:
        way = self._routes.to(plan)
        if not self.tokens or 0 not in way.sources(rank):
            return ()
        with self._storage.metrics.phase("bind"):
            return way.bind(**self._ends(rank, blocks, start)).copies

    def _sums(self, plan: Plan, rank: int, blocks: Any, start: int | None) -> list[RunGrid]:
        """The same runs, which nobody has written out."""
        way = self._routes.to(plan)
        if not self.tokens or 0 not in way.sources(rank):
            return []
        with self._storage.metrics.phase("bind"):
            return way.stream(**self._ends(rank, blocks, start)).grids()

    def _ends(self, rank: int, blocks: Any, start: int | None) -> dict[str, Any]:
        """What is fetched, as routes take it."""
        tokens = self.start if start is None else max(start, self.start), self.tokens
        ends = {"src_blocks": self.tables, "dst_blocks": blocks, "tokens": tokens}
        return {"src_rank": 0, "dst_rank": rank, **ends}

    def release(self) -> None:
        """Unpin the blocks; a second call does nothing."""
        was, self._released = self._released, True
        if not was:
            self.tables = {}
            self._loaded.close()
            self._let_go()


def tables_of(
    plan: Plan, needs: Sequence[NeededBlock], blocks: Sequence[TierBlock]
) -> dict[int, list[int]]:
    """The block ids that have what is needed, by group of the tier's plan."""
    tables = {group: [-1] for group in range(len(plan.groups))}
    for need, block in zip(needs, blocks, strict=True):
        entry = 0 if plan.groups[need.group].kind == "recurrent" else need.entry
        table = tables[need.group]
        table += [-1] * (entry + 1 - len(table))
        table[entry] = block.block_id
    return tables


def _refuse_carry(carry: Carry | None) -> None:
    if carry is not None:
        problem = "Bytes that are converted on their way cannot be carried by somebody else"
        hint = "Fetch into pools that this process reaches, or into a cache of the tier's dtype"
        raise AtlasError(Code.CONTRADICTORY, problem, got="carry= and convert=", hint=hint)


def check_all_there(found: int, wanted: int) -> None:
    """Refuse a fetch of more tokens than a tier has."""
    if found < wanted:
        problem, got = "The tier does not have all tokens", f"{found} of {wanted} tokens"
        hint = "Ask match first, or pin what there is"
        raise AtlasError(Code.MISSING_BLOCKS, problem, got=got, hint=hint)
