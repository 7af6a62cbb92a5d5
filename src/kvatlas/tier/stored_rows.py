"""`StoredRows`: the rows of one plan in a store: what there is, and what can be fetched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvatlas.errors import AtlasError, Code
from kvatlas.models import CacheIdentity
from kvatlas.planning import Plan
from kvatlas.routing import fingerprint
from kvatlas.tier.converting import Converting, TierRoutes
from kvatlas.tier.ingest import check_tier_plan, with_room
from kvatlas.tier.namespaces import Namespace, RowName
from kvatlas.tier.request_blocks import NeededBlock, TierSpans
from kvatlas.tier.row_lookup import RowLookup
from kvatlas.tier.row_objects import RowObjects
from kvatlas.tier.row_traffic import RowTraffic
from kvatlas.tier.staging_rows import StagingRows
from kvatlas.tier.storage import TierStorage
from kvatlas.tier.store_calls import Deadline
from kvatlas.tier.store_hit import StoreHit
from kvatlas.tier.stores import ObjectStore


class OtherRows(NamedTuple):
    """Rows that engines with another cache dtype have stored, and how to convert them."""

    plan: Plan
    convert: Converting


class FoundRows(NamedTuple):
    """How many tokens of a request there are, their rows, and what is missing for more."""

    tokens: int
    rows: Mapping[NeededBlock, RowName]
    missing: str


class StoredRows:
    """Rows of one plan under one identity, on their way to and from a store."""

    def __init__(
        self,
        store: ObjectStore,
        plan: Plan,
        identity: CacheIdentity,
        cut: tuple[int | None, int],
        staging: int,
        convert: Converting | None = None,
    ) -> None:
        """`cut` is for how many shards and stages; `staging` bytes are for rows on their way."""
        check_tier_plan(plan)
        self.plan, self._convert = plan, convert
        objects = RowObjects(plan, *cut)
        self.namespace = Namespace(identity, objects)
        self.staging = StagingRows(objects, staging)
        for memory in self.staging.pools.values():
            store.register(memory)
        self.traffic = RowTraffic(store, self.namespace, self.staging)
        self.storage = TierStorage(self.staging.pools, None, verify_always=False)
        self._lookup = RowLookup(self.traffic, TierSpans(plan, plan))
        self._routes = TierRoutes(with_room(plan))

    def find(self, start: int, stop: int, keys: Mapping[int, Any], deadline: Deadline) -> FoundRows:
        """The most of some tokens that there is."""
        return FoundRows(*self._lookup.longest(start, stop, keys, deadline))

    def kept(
        self, group: int, ends: Sequence[tuple[int, bytes]], deadline: Deadline, *, whole: bool
    ) -> list[bool]:
        """Whether a group has the rows that requests of so many tokens end in."""
        return self._lookup.kept(group, ends, deadline, whole=whole)

    def hit(
        self, start: int, found: FoundRows, seconds: float, missed: Callable[[AtlasError], None]
    ) -> StoreHit:
        """What was found, to be fetched."""
        about = (self.traffic, self.storage, self._routes, self.plan)
        return StoreHit(start, found.tokens, found.rows, *about, seconds, missed, self._convert)

    def close(self, deadline: Deadline) -> bool:
        """Wait for calls that are under way; whether all have ended in time."""
        self.storage.close()
        return self.traffic.calls.close(deadline)


def check_alike(plan: Plan, other: OtherRows) -> None:
    """Refuse rows of another dtype that have not the keys of one's own, or do not become them."""
    check_tier_plan(other.plan)
    mine, theirs = (
        sorted(
            (layer.name, region.group, made.groups[region.group].block)
            for region in made.regions
            for layer in region.layers
        )
        for made in (plan, other.plan)
    )
    if mine != theirs or other.plan.max_len < plan.max_len:
        problem = "Rows of the other dtype are not cut into the same blocks"
        sizes = [[group.block for group in made.groups] for made in (plan, other.plan)]
        got = f"blocks of {sizes[0]} and {sizes[1]} tokens"
        hint = "Plan both with one block_size, and alike but for the dtype"
        raise AtlasError(Code.BAD_PLAN, problem, got=got, hint=hint)
    TierRoutes(other.plan).to(plan, other.convert)
    if fingerprint(plan) == fingerprint(other.plan):
        problem = "Rows of the other dtype are those of one's own"
        hint = "Leave convert out, or name the conversion into the cache's own dtype"
        raise AtlasError(Code.BAD_CONVERSION, problem, got=other.convert.name, hint=hint)
