"""`PlanData`: the fields of a plan, its ranks and pools, and its capacity."""

from __future__ import annotations

from functools import cached_property

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import natural, positive
from kvatlas.planning.plan_parts import Group, Pool, Region, blocks_taken
from kvatlas.specs import Ring

DECODING = 1
"""The number of tokens in flight of a request that decodes."""


class PlanData(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """The data of a plan, without validation. Use `Plan`, which validates it."""

    model: str
    policy: str
    layout: str
    tp: int
    pp: int
    dcp: int
    memory: int
    """Bytes available per rank."""
    block_size: int
    """Tokens per block."""
    max_len: int
    """Tokens of the longest request."""
    in_flight: int
    """Tokens that an engine schedules at once. Windows keep blocks for these tokens too."""
    groups: tuple[Group, ...]
    pools: tuple[Pool, ...]
    regions: tuple[Region, ...]
    backends: tuple[str, ...] = ()
    accepted_layouts: tuple[str, ...] = ()
    """Layouts that work for the plan's backends and pages: those that engines use, and `layout`."""
    pack: int = 1
    """Number of attention layers per page (or per block) in a hybrid."""
    prefix_caching: bool = True
    reasons: tuple[str, ...] = ()
    """The reasons for the block size, and its trade-offs."""
    warnings: tuple[str, ...] = ()

    # -- ranks ----------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        """The number of ranks: tp x pp."""
        return self.tp * self.pp

    def split_rank(self, rank: int) -> tuple[int, int]:
        """Return the (pipeline stage, tensor-parallel rank) of a global rank.

        Ranks are numbered stage by stage.

        >>> from kvatlas.planning import plan
        >>> plan("gpt-oss-20b", memory="40GiB", tp=2, pp=2).split_rank(3)
        (1, 1)
        """
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.ranks:
            raise AtlasError(
                Code.BAD_RANK,
                got=f"rank {rank!r} with tp {self.tp} and pp {self.pp}",
                hint=f"Use a rank in 0..{self.ranks - 1}",
            )
        return divmod(rank, self.tp)

    def rank_pools(self, rank: int) -> dict[int, Pool]:
        """Return the pools of a rank's pipeline stage, by pool index."""
        stage, _ = self.split_rank(rank)
        return {pool.index: pool for pool in self.pools if pool.stage == stage}

    def pool(self, rank: int, group: int) -> Pool:
        """Return the pool that provides a group's blocks on a rank.

        >>> from kvatlas.planning import plan
        >>> plan("gpt-oss-20b", memory="40GiB").pool(rank=0, group=1).blocks
        109226
        """
        stage, _ = self.split_rank(rank)
        pool = self.pools_by_stage.get((stage, self.groups[group].pool))
        if pool is None:
            raise AtlasError(
                Code.OUT_OF_RANGE,
                f"Rank {rank} has no pool for group {group}",
                got=f"pools {sorted(self.rank_pools(rank))} on stage {stage}",
                hint="Use a rank whose stage has layers of this group",
            )
        return pool

    @cached_property
    def pools_by_stage(self) -> dict[tuple[int, int], Pool]:
        """Pools by (pipeline stage, index)."""
        return {(pool.stage, pool.index): pool for pool in self.pools}

    @cached_property
    def rings(self) -> dict[str, Ring]:
        """The rings of the plan, by layer name; of layers with equal rings, only one is listed."""
        layers = (layer for region in self.regions for layer in region.layers)
        names = {layer.spec: layer.name for layer in layers if isinstance(layer.spec, Ring)}
        return {name: spec for spec, name in names.items()}

    # -- capacity -------------------------------------------------------------------

    @property
    def _first_pool(self) -> Pool:
        return min(self.pools, key=lambda pool: (pool.index, pool.stage))

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the first pool, including the null block that engines reserve."""
        return self._first_pool.blocks

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block of the first pool, on the first stage that has this pool."""
        return self._first_pool.block_bytes

    def blocks_per_request(
        self, length: int | None = None, *, in_flight: int | None = None
    ) -> dict[int, int]:
        """Return how many blocks of each pool a request of `length` tokens takes, by pool index.

        `length` defaults to `max_len`. `in_flight` is the number of tokens that are scheduled but
        not computed; it defaults to the plan's `in_flight`.
        """
        tokens = self.max_len if length is None else positive(length, "the length")
        flying = self.in_flight if in_flight is None else natural(in_flight, "in_flight")
        return blocks_taken(self.groups, tokens, in_flight=flying, dcp=self.dcp)

    def requests(self, length: int | None = None, *, in_flight: int | None = None) -> float:
        """Return how many requests of `length` tokens (default: `max_len`) fit at once.

        `in_flight` is the number of tokens of each request that are scheduled but not computed;
        sliding windows hold extra blocks for them. The default is the plan's `in_flight`, for
        requests that all prefill. Pass 1 (`DECODING`) for requests that all decode.

        >>> from kvatlas.planning import plan
        >>> made = plan("gpt-oss-20b", memory="40GiB", max_len="128K")
        >>> round(made.requests()), round(made.requests(in_flight=1))
        (12, 13)
        """
        taken = self.blocks_per_request(length, in_flight=in_flight)
        return min(
            (pool.blocks / taken[pool.index] for pool in self.pools if taken.get(pool.index)),
            default=float("inf"),
        )

    @property
    def tokens(self) -> int:
        """Total number of tokens that fit if every request has `max_len` tokens."""
        return int(self.requests() * self.max_len)
