"""`StoredRows`: find and fetch the rows of one plan in an object store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvatlas.errors import AtlasError, Code
from kvatlas.models import CacheIdentity
from kvatlas.planning import Plan
from kvatlas.routing import fingerprint
from kvatlas.tier.converting import Converting, TierRoutes
from kvatlas.tier.ingest import check_tier_plan, with_room
from kvatlas.tier.namespaces import Namespace
from kvatlas.tier.request_blocks import TierSpans
from kvatlas.tier.row_lookup import FoundRows, RowLookup
from kvatlas.tier.row_objects import RowObjects
from kvatlas.tier.row_traffic import RowTraffic
from kvatlas.tier.staging_rows import StagingRows
from kvatlas.tier.storage import TierStorage
from kvatlas.tier.store_calls import Deadline
from kvatlas.tier.store_hit import StoreHit
from kvatlas.tier.stores import ObjectStore


class OtherRows(NamedTuple):
    """The plan of rows that engines with another cache dtype store, and how to convert them."""

    plan: Plan
    convert: Converting


class StoredRows:
    """The rows of one plan and one cache identity in a store. A row is one block of the plan."""

    def __init__(
        self,
        store: ObjectStore,
        plan: Plan,
        identity: CacheIdentity,
        cut: tuple[int | None, int],
        staging: int,
        convert: Converting | None = None,
    ) -> None:
        """Open the rows of `plan`. `cut` is (shards, stages), as `RowObjects` takes them.

        `staging` is the number of bytes for rows in flight. With `convert`, fetches convert rows.
        """
        check_tier_plan(plan)
        self.plan, self._convert = plan, convert
        objects = RowObjects(plan, *cut)
        self.namespace = Namespace(identity, objects)
        self.staging = StagingRows(objects, staging)
        for memory in self.staging.pools.values():
            store.register(memory)
        self.traffic = RowTraffic(store, self.namespace, self.staging)
        self.storage = TierStorage(self.staging.pools, None, verify_always=False)
        self._spans = TierSpans(plan, plan)
        self.lookup = RowLookup(self.traffic, self._spans)
        self._routes = TierRoutes(with_room(plan))

    def remove(self, keys: Mapping[int, Sequence[bytes | None]]) -> int:
        """Remove the rows of keys, given by group, and return how many objects were removed.

        Some stores can remove by prefix only by comparing the prefix with every object name. In
        such a store, attention rows are removed by listing all names that their objects can have.
        Recurrent states are always removed by prefix, because their names contain the length of
        the request.
        """
        store, names = self.traffic.store, self.namespace
        removed = 0
        for group, key in ((group, key) for group, row in keys.items() for key in row if key):
            if store.removes_by_prefix or self._spans.recurrent(group):
                removed += store.remove_all(names.all_of(group, key))
            else:
                removed += store.remove(names.names_with(group, key, self._spans.covers(group)))
        return removed

    def hit(
        self, start: int, found: FoundRows, timeout: float, missed: Callable[[AtlasError], None]
    ) -> StoreHit:
        """Return the found rows as a hit that can be fetched."""
        about = (self.traffic, self.storage, self._routes, self.plan)
        return StoreHit(start, found.tokens, found.rows, *about, timeout, missed, self._convert)

    def close(self, deadline: Deadline) -> bool:
        """Wait for calls in flight and return whether all have finished in time."""
        idle = self.storage.close(deadline.left)
        return self.traffic.calls.close(deadline) and idle


def check_alike(plan: Plan, other: OtherRows) -> None:
    """Raise an error unless rows of `other` can be found by the keys of `plan` and converted.

    The two plans must have the same layers, groups and block sizes.
    """
    check_tier_plan(other.plan)
    mine, theirs = (
        sorted(
            (layer.name, region.group, made.groups[region.group].block)
            for region in made.regions
            for layer in region.layers
        )
        for made in (plan, other.plan)
    )
    if mine != theirs:
        problem = "Rows of the two dtypes must have the same layers, groups and block sizes"
        sizes = [[group.block for group in made.groups] for made in (plan, other.plan)]
        got = (
            f"{len(mine)} layers in groups with blocks of {sizes[0]} tokens, and "
            f"{len(theirs)} layers in groups with blocks of {sizes[1]} tokens"
        )
        hint = "Make both plans with the same block_size and options, except for the dtype"
        raise AtlasError(Code.BAD_PLAN, problem, got=got, hint=hint)
    if other.plan.max_len < plan.max_len:
        problem = f"The plan of the other rows must have a max_len of at least {plan.max_len}"
        hint = f"Make that plan with max_len={plan.max_len}"
        raise AtlasError(Code.BAD_PLAN, problem, got=other.plan.max_len, hint=hint)
    TierRoutes(other.plan).to(plan, other.convert)
    if fingerprint(plan) == fingerprint(other.plan):
        problem = "The tier already stores this dtype, so there is nothing to convert"
        hint = "Omit convert=, or pass a conversion from another dtype to the cache's dtype"
        raise AtlasError(Code.BAD_CONVERSION, problem, got=repr(other.convert.name), hint=hint)
