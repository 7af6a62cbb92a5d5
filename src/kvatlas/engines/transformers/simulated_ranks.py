"""Simulated ranks: distribute the cache of a single-process model over the pools of many ranks.

transformers keeps all heads of all layers on one rank. `SimulatedRanks` allocates the pools that
the ranks of another plan would have and copies an `AtlasCache` to and from them along a route.
Disaggregated prefill and decode can thus be tested between any two topologies.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from kvatlas.copying import copy_request
from kvatlas.engines.transformers.cache import AtlasCache
from kvatlas.engines.transformers.identity_of_model import model_identity
from kvatlas.planning import Plan
from kvatlas.routing import route, scattered
from kvatlas.wire import Node, make_transport, memory_of, pools_for


class SimulatedRanks(ExitStack):
    """The pools of all ranks of a plan, with one `Node` per rank.

    `model` is the transformers model that computes the caches. Before a transfer, nodes compare the
    identity of this model with the identity that their peers report. `options` are passed to
    `Node`.
    """

    def __init__(
        self, plan: Plan, transport: str, *, name: str, model: Any, **options: Any
    ) -> None:
        super().__init__()
        options.setdefault("identity", model_identity(model))
        self.plan = plan
        self.nodes: list[Node] = []
        self.pools = {}
        for rank in range(plan.ranks):
            wire = make_transport(transport)
            self.pools[rank] = pools_for(plan, rank, wire)
            options |= {"memory": memory_of(self.pools[rank]), "name": f"{name}-{rank}"}
            node = Node(plan, rank=rank, transport=wire, **options)
            self.nodes.append(self.enter_context(node))

    @property
    def endpoints(self) -> list[str]:
        """The endpoints on which the ranks listen."""
        return [node.endpoint for node in self.nodes]

    def copy_from(self, cache: AtlasCache, tokens: int, sequence: int = 0) -> dict[int, list[int]]:
        """Copy a sequence of a cache to the ranks; return its block ids on the ranks, by group."""
        blocks = scattered(self.plan, tokens)
        copy_request(
            route(cache.plan, self.plan), _pools(cache), self.pools,
            source_blocks=cache.blocks_of(sequence), destination_blocks=blocks, tokens=tokens,
        )  # fmt: skip
        return blocks

    def copy_to(self, cache: AtlasCache, blocks: dict[int, list[int]], tokens: int) -> None:
        """Replace the content of a cache with the sequence that the ranks store in `blocks`."""
        (mine,) = cache.adopt(tokens)
        copy_request(
            route(self.plan, cache.plan), self.pools, _pools(cache),
            source_blocks=blocks, destination_blocks=mine, tokens=tokens,
        )  # fmt: skip


def _pools(cache: AtlasCache) -> dict[int, dict[int, Any]]:
    return {0: {index: pool.numpy() for index, pool in cache.cache.pools.items()}}
