"""`Hit`: the tokens of a request that a tier stores, pinned until they are released."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from kvatlas.copying.memory_copy import is_on_gpu
from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.routing import Copy
from kvatlas.routing.block_tables import checked_rank
from kvatlas.tier.converting import Converting, TierRoutes
from kvatlas.tier.storage import Carry, TierStorage


@dataclass(eq=False, repr=False)
class Hit:
    """Tokens of a request that a tier stores. Their blocks are not evicted until `release`."""

    start: int
    tokens: int
    """Number of leading tokens of the request that can be fetched."""
    _storage: TierStorage
    _routes: TierRoutes
    tables: Mapping[int, Any]
    """The tier's block ids by group. Entries that are not needed are -1, which routes reject."""
    _let_go: Callable[[], None]
    """Unpins the blocks. Called once."""
    name: bytes = b""
    """The name by which other clients of a served tier can join this pin."""
    _loaded: ExitStack = field(default_factory=ExitStack)
    """Releases the staging memory of a tier in a file."""
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
        """Fetch the tokens into one rank's blocks. `Route.bind` describes the form of `blocks`.

        If `start` is given, tokens before it are left unchanged. With `convert`, a layer is
        converted if its dtype in the tier differs from its dtype in the rank's cache.
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
            as_grids = offload is not None or not (carry or is_on_gpu(pools))
            copies = self._bound(plan, rank, blocks, start, as_grids=as_grids)
            if not as_grids:
                storage.load(copies, self._loaded)
            fetch = offload.fetch if offload else None
            read = carry or fetch or storage.reading(plan, rank, pools or {})
            storage.carry("fetch", copies, read)

    def copies(self, plan: Plan, *, rank: int = 0, blocks: Any) -> Sequence[Copy]:
        """Return the copy operations from `tier.memory` to a rank's pools, for any transport.

        For a tier in a file, the bytes in `tier.memory` are valid until the hit is released.
        """
        with self._storage.using():
            copies = self._bound(plan, rank, blocks)
            self._storage.load(copies, self._loaded)
            return copies

    def _bound(
        self,
        plan: Plan,
        rank: int,
        blocks: Any,
        start: int | None = None,
        *,
        as_grids: bool = False,
    ) -> Sequence[Copy]:
        """Return the copy operations of a fetch.

        With `as_grids`, one `Copy` describes many runs by spans and starts (see `Copy.starts`).
        """
        way = self._routes.to(plan)
        if not self.tokens or 0 not in way.sources(rank):
            return ()
        ends = self._ends(rank, blocks, start)
        with self._storage.metrics.phase("bind"):
            return way.stream(**ends).grids() if as_grids else way.bind(**ends).copies

    def _ends(self, rank: int, blocks: Any, start: int | None) -> dict[str, Any]:
        tokens = self.start if start is None else max(start, self.start), self.tokens
        return fetch_ends(self.tables, rank, blocks, tokens)

    def release(self) -> None:
        """Unpin the blocks. A second call does nothing."""
        was, self._released = self._released, True
        if not was:
            self.tables = {}
            self._loaded.close()
            self._let_go()


def _refuse_carry(carry: Carry | None) -> None:
    if carry is not None:
        raise AtlasError(
            Code.CONTRADICTORY,
            "A fetch cannot combine carry= with convert=",
            got="both options",
            hint="Omit carry= and pass pools that this process can access, or omit convert=",
        )


def fetch_ends(tables: Any, rank: int, blocks: Any, tokens: tuple[int, int]) -> dict[str, Any]:
    """Return the arguments of `Route.bind` for a fetch from a tier's blocks into a rank's."""
    ends = {"source_blocks": tables, "destination_blocks": blocks, "tokens": tokens}
    return {"source_rank": 0, "destination_rank": rank, **ends}


def check_all_there(found: int, wanted: int) -> None:
    """Raise an error if fewer tokens were found than a fetch requested."""
    if found < wanted:
        problem, got = "The tier does not store all requested tokens", f"{found} of {wanted} tokens"
        hint = "Fetch only the tokens that match() or pin() finds, and compute the others"
        raise AtlasError(Code.MISSING_BLOCKS, problem, got=got, hint=hint)
