"""Store windows and recurrent states of running requests, at positions that later requests need.

vLLM frees the blocks before a window, and overwrites a state, long before a request ends. The
scheduler therefore selects positions while the prompt is computed, and holds their blocks until all
workers have stored them. vLLM ends a step at a state's position if that position is the request's
`shared_prefix_boundary`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from math import lcm
from typing import Any

from kvatlas.engines.vllm.orders import StoreOrder
from kvatlas.engines.vllm.prefix_tier import PrefixTier
from kvatlas.engines.vllm.transfer_groups import TransferGroups
from kvatlas.pool import Checkpoints
from kvatlas.tier.chained_keys import PrefixChain
from kvatlas.tier.stored_positions import default_policy, stored_positions


@dataclass
class _Running:
    request: Any
    chain: PrefixChain
    attention: int
    """Number of leading tokens for which the tier had the rows of full attention."""
    stored: int
    """Like `attention`, but including the rows that checkpoints of this request have stored."""


@dataclass
class _Held:
    request_id: str
    blocks: list[Any]
    workers: int
    """Number of workers that have yet to store the checkpoint."""


class StoredCheckpoints:
    """Select positions of running requests, and hold their blocks until they are stored."""

    def __init__(
        self,
        tier: PrefixTier,
        groups: TransferGroups,
        *,
        workers: int,
        policy: Checkpoints | None = None,
    ) -> None:
        """Set up without requests; `policy` selects the positions at which to store.

        The default policy depends on whether the model has recurrent states. A checkpoint is
        complete once all `workers` workers have stored it.
        """
        self._tier, self._groups, self._workers = tier, groups, workers
        self._policy = policy or default_policy(recurrent=tier.recurrent)
        state_block = groups.state_block if tier.recurrent else 1
        self._step = lcm(tier.step, state_block or 1)
        self.usable = tier.partial and not tier.keeps_windows_whole and state_block is not None
        """Whether the model needs checkpoints, and vLLM keeps what they contain."""
        self._running: dict[str, _Running] = {}
        self._held: dict[int, _Held] = {}
        self._numbers = count(1)

    def begin(self, request: Any, chain: PrefixChain, computed: int, attention: int) -> None:
        """Store checkpoints of a request, after the first `computed` tokens of its prompt."""
        running = _Running(request, chain, attention, attention)
        self._running[request.request_id] = running
        self._aim(running, self._positions(running, computed))

    def scheduled(self, scheduler_output: Any) -> list[StoreOrder]:
        """Return orders to store the checkpoints that a step computes; send them after the step."""
        if not self._running:
            return []
        cached = scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in scheduler_output.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
        orders = []
        for name, start in computed.items():
            running = self._running.get(name)
            if running is None:
                continue
            stop = start + scheduler_output.num_scheduled_tokens[name]
            positions = self._positions(running, start)
            reached = [one for one in positions if one <= stop]
            if self._tier.recurrent:  # a state exists only where a step ends
                reached = [one for one in reached if one == stop]
            if reached:
                orders.append(self._order(name, running, reached))
            later = [one for one in positions if one > stop]
            self._aim(running, later)
            if not later:
                del self._running[name]
        return orders

    def stored(self, checkpoints: Mapping[int, int]) -> None:
        """Record how many workers have stored each checkpoint.

        The blocks of a checkpoint are released once all workers have stored it.
        """
        for number, workers in checkpoints.items():
            held = self._held.get(number)
            if held is None:
                continue
            held.workers -= workers
            if held.workers <= 0:
                self._groups.release(self._held.pop(number).blocks)

    def holds(self, request_id: str) -> bool:
        """Return whether workers have yet to store a checkpoint of a request."""
        return any(held.request_id == request_id for held in self._held.values())

    def forget(self, request_id: str) -> None:
        """Store no further checkpoints of a request."""
        self._running.pop(request_id, None)

    def forget_all(self) -> None:
        """Store no further checkpoints of the requests that run now."""
        self._running.clear()

    def _positions(self, running: _Running, computed: int) -> list[int]:
        prompt = running.chain.count + 1
        about = {"prompt": prompt, "hit": computed, "attention": running.attention}
        return stored_positions(self._policy, step=self._step, **about)

    def _aim(self, running: _Running, positions: list[int]) -> None:
        """Make vLLM end a step at the next position, if a recurrent state is stored there."""
        if self._tier.recurrent and positions:
            running.request.shared_prefix_boundary = positions[0]

    def _order(self, name: str, running: _Running, reached: list[int]) -> StoreOrder:
        spans = []
        for stop in reached:
            spans.append((self._tier.start_for(running.stored, stop), stop))
            running.stored = stop
        # The tier stores whole rows, so it also reads the tokens before `spans` in their first row.
        first = spans[0][0] // self._step * self._step
        tables, blocks = self._groups.hold(name, first, stop)
        number = next(self._numbers)
        self._held[number] = _Held(name, blocks, self._workers)
        return StoreOrder(name, running.chain.keys(stop), tables, tuple(spans), number)


def add_counts(one: Mapping[int, int], two: Mapping[int, int]) -> dict[int, int]:
    """Add the counts that two workers report.

    >>> add_counts({1: 1}, {1: 1, 2: 1})
    {1: 2, 2: 1}
    """
    return dict(Counter(one) + Counter(two))
