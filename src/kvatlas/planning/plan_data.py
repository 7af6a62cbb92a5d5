"""What a plan consists of, which pools a rank has, and how much fits."""

from __future__ import annotations

from functools import cached_property

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import natural, positive
from kvatlas.planning.plan_parts import Group, Pool, Region, blocks_taken

DECODING = 1
"""Tokens that a request which decodes has in flight."""


class PlanData(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """The data of a plan, not yet checked: `Plan` is what to use."""

    model: str
    policy: str
    layout: str
    tp: int
    pp: int
    dcp: int
    memory: int
    block_size: int
    max_len: int
    in_flight: int
    groups: tuple[Group, ...]
    pools: tuple[Pool, ...]
    regions: tuple[Region, ...]
    backends: tuple[str, ...] = ()
    accepted_layouts: tuple[str, ...] = ()
    """Orders of engines that suit its backends and pages, and its own."""
    pack: int = 1
    prefix_caching: bool = True
    reasons: tuple[str, ...] = ()
    """Why the block is as large as it is, and what was traded for it."""
    warnings: tuple[str, ...] = ()

    # -- ranks ----------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        """How many ranks there are: those of tensor parallelism on every pipeline stage."""
        return self.tp * self.pp

    def split_rank(self, rank: int) -> tuple[int, int]:
        """(pipeline stage, tensor-parallel rank) of a rank; stages count slowest.

        >>> from kvatlas.planning import plan
        >>> plan("gpt-oss-20b", memory="40GiB", tp=2, pp=2).split_rank(3)
        (1, 1)
        """
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.ranks:
            got = f"rank {rank!r} of tp {self.tp} x pp {self.pp}"
            raise AtlasError(Code.BAD_RANK, got=got, hint=f"Ranks are 0..{self.ranks - 1}")
        return divmod(rank, self.tp)

    def rank_pools(self, rank: int) -> dict[int, Pool]:
        """The pools of a rank by their index: those of its pipeline stage."""
        stage, _ = self.split_rank(rank)
        return {pool.index: pool for pool in self.pools if pool.stage == stage}

    def pool(self, rank: int, group: int) -> Pool:
        """The pool that a group draws blocks from on a rank.

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
                hint="None of the group's layers lie on that stage",
            )
        return pool

    @cached_property
    def pools_by_stage(self) -> dict[tuple[int, int], Pool]:
        """Pools by (pipeline stage, index)."""
        return {(pool.stage, pool.index): pool for pool in self.pools}

    # -- capacity -------------------------------------------------------------------

    @property
    def _first_pool(self) -> Pool:
        return min(self.pools, key=lambda pool: (pool.index, pool.stage))

    @property
    def num_blocks(self) -> int:
        """Blocks of the first pool, one of which engines keep as the null block."""
        return self._first_pool.blocks

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block of the first pool, on the first stage that has it."""
        return self._first_pool.block_bytes

    def blocks_per_request(
        self, length: int | None = None, *, in_flight: int | None = None
    ) -> dict[int, int]:
        """Blocks that a request of `length` tokens takes of each pool, by the pool's index."""
        tokens = self.max_len if length is None else positive(length, "the length")
        under_way = self.in_flight if in_flight is None else natural(in_flight, "in_flight")
        return blocks_taken(self.groups, tokens, in_flight=under_way, dcp=self.dcp)

    def requests(self, length: int | None = None, *, in_flight: int | None = None) -> float:
        """How many requests of `length` tokens fit at once.

        Windows also cover tokens in flight: as many as the plan was made for, which is a
        prefill of every request at once, or `in_flight`, `DECODING` where all of them decode.

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
        """Tokens that fit in requests of the greatest length."""
        return int(self.requests() * self.max_len)
