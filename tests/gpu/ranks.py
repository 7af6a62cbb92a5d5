"""All ranks of a plan in this process, their pools on a GPU between guard bytes."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import torch

from kvatlas.copying.run_bounds import Bytes
from kvatlas.planning import Plan
from kvatlas.routing import scattered
from kvatlas.wire import Node, make_transport
from tests.identities import OURS
from tests.routing.oracle import Memory

GUARD, GUARDED = 4096, 0xA5
OPTIONS: dict[str, dict[str, Any]] = {"nixl": {"kind": "VRAM"}}
"""What a transport is made with where the pools are a GPU's."""

Contents = dict[int, dict[int, Bytes]]
"""Bytes by rank and pool."""


class GpuRanks:
    """Nodes of all ranks of a plan."""

    def __init__(
        self, plan: Plan, transport: str, contents: Contents, tokens: int, **given: Any
    ) -> None:
        self.plan, self.tokens = plan, tokens
        self.blocks = scattered(plan, tokens)
        self.device = given.pop("device", "cuda:0")
        self.whole = {
            rank: {index: self._guarded(pool) for index, pool in pools.items()}
            for rank, pools in contents.items()
        }
        self.released: list[tuple[int, str, str]] = []
        self._serve(transport, given)

    def _serve(self, transport: str, given: dict[str, Any]) -> None:
        options = given.pop("options", OPTIONS.get(transport, {}))
        about: dict[str, Any] = {"piece": 64 << 10, "buffers": 4, "name": "ranks"} | given
        torch.cuda.synchronize()
        self.nodes = [
            Node(
                self.plan, rank=rank, memory=self.pools(rank),
                transport=make_transport(transport, **options), identity=OURS, **about,
            )
            for rank in self.whole
        ]  # fmt: skip

    def _guarded(self, pool: Bytes) -> torch.Tensor:
        whole = np.full(pool.nbytes + 2 * GUARD, GUARDED, np.uint8)
        whole[GUARD:-GUARD] = pool
        return torch.from_numpy(whole).to(self.device)

    def pools(self, rank: int) -> dict[int, torch.Tensor]:
        """The pools of a rank alone."""
        return {index: whole[GUARD:-GUARD] for index, whole in self.whole[rank].items()}

    @property
    def endpoints(self) -> list[str]:
        return [node.endpoint for node in self.nodes]

    def offer(self, request: str, timeout: float = 60.0) -> None:
        for node in self.nodes:
            rank = node.rank

            def noted(request: str, why: str, rank: int = rank) -> None:
                self.released.append((rank, request, why))

            node.offer(request, self.blocks, self.tokens, timeout=timeout, released=noted)

    def wrong(self, right: Contents | dict[int, Memory]) -> int:
        """Bytes that are not as they should be, guards included."""
        torch.cuda.synchronize()
        found = 0
        for rank, memory in right.items():
            for index, pool in (memory.pools if isinstance(memory, Memory) else memory).items():
                whole = self.whole[rank][index].cpu().numpy()
                inside = whole[GUARD:-GUARD]
                pool = memory.beside(index, inside) if isinstance(memory, Memory) else pool
                found += int((inside != pool).sum())
                found += sum(int((g != GUARDED).sum()) for g in (whole[:GUARD], whole[-GUARD:]))
        return found

    def close(self) -> None:
        for node in self.nodes:
            node.server.stop()
        for node in self.nodes:
            node.close()
            assert node.transport.registered == 0

    def free(self) -> None:
        """Close, and give the memory back to the driver."""
        self.close()
        self.whole.clear()
        self.nodes.clear()
        gc.collect()
        torch.cuda.empty_cache()


class LargeRank(GpuRanks):
    """The one rank of a plan, with more bytes than anybody looks at one by one."""

    def __init__(self, plan: Plan, transport: str, tokens: int, **given: Any) -> None:
        super().__init__(plan, transport, {}, tokens)
        sizes = {pool.index: pool.nbytes + 2 * GUARD for pool in plan.rank_pools(0).values()}
        self.whole[0] = {
            index: torch.full((nbytes,), GUARDED, dtype=torch.uint8, device=self.device)
            for index, nbytes in sizes.items()
        }
        self._serve(transport, {"buffers": 0} | given)
