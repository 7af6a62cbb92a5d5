"""A model that runs in one process, on the wire as if it ran on many ranks.

transformers keeps all heads of all layers in one place. `Ranks` holds the pools that the
ranks of some other plan would have, fills them from an `AtlasCache` and pours them back,
along a route, so that prefill and decode can be tried in any two topologies.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from kvatlas.engines.transformers.cache import AtlasCache
from kvatlas.planning import Plan
from kvatlas.routing import route, scattered
from kvatlas.wire import Node, Transport, copy_request, make_transport, memory_of, pools_for


class Ranks:
    """The pools of every rank of a plan, each rank a node on the wire."""

    def __init__(self, plan: Plan, transport: str, *, name: str, **options: Any) -> None:
        self.plan = plan
        self._stack = ExitStack()
        self.nodes: list[Node] = []
        self.pools = {}
        for rank in range(plan.tp * plan.pp):
            made: Transport = make_transport(transport)
            self.pools[rank] = pools_for(plan, rank, made)
            memory = memory_of(self.pools[rank])
            node = Node(
                plan, rank=rank, memory=memory, transport=made, name=f"{name}-{rank}", **options
            )
            self.nodes.append(self._stack.enter_context(node))

    @property
    def endpoints(self) -> list[str]:
        """Where the ranks listen."""
        return [node.endpoint for node in self.nodes]

    def fill(self, cache: AtlasCache, tokens: int, row: int = 0) -> dict[int, list[int]]:
        """Put a row of a cache on the ranks; returns the blocks that it takes there."""
        blocks = scattered(self.plan, tokens)
        copy_request(
            route(cache.plan, self.plan, renamed=True), _pools(cache), self.pools,
            src_blocks=cache.blocks_of(row), dst_blocks=blocks, tokens=tokens,
        )  # fmt: skip
        return blocks

    def pour(self, blocks: dict[int, list[int]], cache: AtlasCache, tokens: int) -> None:
        """Make what the ranks hold the first row of an empty cache."""
        (mine,) = cache.adopt(tokens)
        copy_request(
            route(self.plan, cache.plan, renamed=True), self.pools, _pools(cache),
            src_blocks=blocks, dst_blocks=mine, tokens=tokens,
        )  # fmt: skip

    def close(self) -> None:
        """Leave the wire."""
        self._stack.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pools(cache: AtlasCache) -> dict[int, dict[int, Any]]:
    return {0: {index: pool.numpy() for index, pool in cache.cache.pools.items()}}
