"""`AnyTier`: the methods of all tiers, whether their blocks are in memory, a file or a store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

from kvatlas.planning import Plan
from kvatlas.routing.token_ranges import token_range
from kvatlas.tier.blocks import StoreResult
from kvatlas.tier.converting import Converting
from kvatlas.tier.hit import Hit, check_all_there
from kvatlas.tier.request_blocks import Keys
from kvatlas.tier.store_hit import StoreHit
from kvatlas.wire import Metrics


class AnyTier(ABC):
    """Storage for prefixes outside the GPU, found by keys. Tiers are thread-safe."""

    plan: Plan
    """The plan of the tier's blocks or rows. Keys are computed for it."""
    metrics: Metrics

    @property
    def converts(self) -> bool:
        """Whether lookups also find rows of another cache dtype."""
        return False

    @abstractmethod
    def store(
        self,
        pools: Mapping[int, Any] | None,
        plan: Plan,
        *,
        rank: int = 0,
        blocks: Any,
        tokens: Any,
        keys: Keys,
    ) -> StoreResult:
        """Store one rank's part of a request's tokens. Every rank of `plan` must call this."""

    @abstractmethod
    def match(self, keys: Keys, tokens: Any) -> int:
        """Return how many tokens can be fetched: all of them, or a number of whole blocks."""

    @abstractmethod
    def pin(self, keys: Keys, tokens: Any) -> AbstractContextManager[Hit | StoreHit]:
        """Find the stored blocks of `tokens`. Any number of ranks can fetch them."""

    def fetch(
        self,
        pools: Mapping[int, Any] | None,
        plan: Plan,
        *,
        rank: int = 0,
        blocks: Any,
        tokens: Any,
        keys: Keys,
        convert: Converting | None = None,
        **options: Any,
    ) -> None:
        """Fetch tokens into a rank's blocks. Raises an error if the tier lacks some of them.

        With `convert`, a layer is converted if its dtype in the tier differs from its dtype in the
        rank's cache. `options` are passed to the `fetch` of the hit, such as `carry` (see
        `Hit.fetch`). If a fetch from a store fails halfway, some blocks have been overwritten.
        """
        _, stop = token_range(tokens, min(plan.max_len, self.plan.max_len))
        with self.pin(keys, tokens) as hit:
            check_all_there(hit.tokens, stop)
            hit.fetch(pools, plan, rank=rank, blocks=blocks, convert=convert, **options)

    @abstractmethod
    def kept_ends(
        self, group: int, ends: Sequence[tuple[int, bytes]], *, whole: bool = False
    ) -> list[bool]:
        """Return, for each prefix in `ends`, whether a group stores the block that ends with it.

        A prefix of a request is given as (length, key): its number of tokens, and the key of its
        last block. With `whole`, all parts of the block must be stored.
        """

    @abstractmethod
    def drop(self, keys: Keys) -> int:
        """Remove keys from every group and return how many blocks or objects were removed."""

    @abstractmethod
    def close(self) -> None:
        """Wait for calls in flight, then close the tier."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
