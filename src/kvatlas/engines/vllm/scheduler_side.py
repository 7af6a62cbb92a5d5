"""The scheduler's part of the connector: which tokens to load, from where, which blocks to keep.

A decode engine always computes the last token of a prompt, even if it has read that token's cache.
Computing the last token requires the windows and recurrent states of the tokens before. For a model
with windows or recurrent layers, the prefill engine therefore omits the last token.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kvatlas.engines.vllm.made_offers import MadeOffers
from kvatlas.engines.vllm.orders import (
    LoadOrder,
    PullOrder,
    RemoteRequest,
    StepOrders,
    StoreOrder,
    Tables,
)
from kvatlas.engines.vllm.prefix_tier import PrefixTier
from kvatlas.engines.vllm.remote_prefills import RemotePrefills
from kvatlas.engines.vllm.stored_checkpoints import StoredCheckpoints
from kvatlas.engines.vllm.tier_scheduler import LOOKUP_TIMEOUT, TierScheduler
from kvatlas.engines.vllm.transfer_groups import TransferGroups
from kvatlas.errors import AtlasError
from kvatlas.pool import BlockEvent, Checkpoints

log = logging.getLogger("kvatlas.vllm")

_SHORTER = "_kvatlas_stops_short"


class SchedulerSide:
    """The part of the connector that runs in the scheduler's process."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        *,
        tier: PrefixTier | None = None,
        alone: bool = False,
        lease_seconds: float = 30.0,
    ) -> None:
        """Set up the connector in the scheduler of one engine.

        `tier` stores finished requests. If `alone` is true, the engine exchanges no caches with
        other engines. Workers keep the blocks of an offered request for `lease_seconds`.
        """
        self._alone = alone
        self._groups = TransferGroups(
            kv_cache_config, prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching)
        )
        self._remote = RemotePrefills(
            spreads_siblings=_balances_requests(vllm_config.parallel_config)
        )
        engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self._offers = MadeOffers(engine_id, self._groups, lease_seconds=lease_seconds)
        # Drafters of several modules look ahead: their cache of the last tokens is speculative.
        ahead = getattr(vllm_config, "num_prefill_lookahead_tokens", 0) - 1
        self._left_out = max(ahead, int(self._groups.partial))
        self._ahead = ahead
        self._guesses = getattr(vllm_config, "speculative_config", None) is not None
        self._workers = getattr(vllm_config.parallel_config, "world_size", 1)
        self._tier: TierScheduler | None = None
        self._checkpoints: StoredCheckpoints | None = None
        if tier is not None:
            self.use_tier(tier)
        self._pulling: set[str] = set()
        """Requests in flight from another engine or from the tier."""
        self._windows_alone: set[str] = set()
        """Requests of which only windows were read, although this engine keeps all tokens."""
        self._orders = StepOrders()

    # -- startup --------------------------------------------------------------------------

    def set_endpoints(self, endpoints: dict[tuple[int, int], str]) -> None:
        """Record the endpoints of this engine's ranks, by stage and tensor-parallel rank."""
        self._offers.endpoints = tuple(endpoints[key] for key in sorted(endpoints))

    @property
    def has_tier(self) -> bool:
        """Whether requests are looked up in a tier."""
        return self._tier is not None

    def use_tier(
        self,
        tier: PrefixTier,
        timeout: float = LOOKUP_TIMEOUT,
        *,
        keeps: bool = True,
        policy: Checkpoints | None = None,
    ) -> None:
        """Look up requests in a tier, and store requests in it if `keeps` is true.

        A request waits for its lookup for at most `timeout` seconds. `policy` selects the positions
        of a prompt at which windows and recurrent states are stored.
        """
        ahead, guesses = self._ahead, self._guesses
        made = TierScheduler(tier, ahead=ahead, guesses=guesses, timeout=timeout)
        made.keeps &= keeps
        self._tier = made
        stored = StoredCheckpoints(tier, self._groups, workers=self._workers, policy=policy)
        self._checkpoints = stored if stored.usable and made.keeps else None

    def bind_manager(self, kv_cache_manager: Any) -> None:
        """Bind vLLM's block managers, which count the cached blocks of each request."""
        self._groups.bind_manager(kv_cache_manager)

    # -- requests -------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Register a request whose prefill and decode run on different engines."""
        params = request.kv_transfer_params or {}
        if self._alone:
            return
        if params.get("do_remote_decode"):
            self._stop_short(request, params)
        if params.get("do_remote_prefill"):
            try:
                self._remote.expect(request, RemoteRequest.read(params), self._orders)
            except AtlasError as refusal:
                log.warning(
                    "computing the request locally request=%r: %s", request.request_id, refusal
                )
                # Siblings may share the dictionary, so it is replaced instead of changed.
                request.kv_transfer_params = params | {"do_remote_prefill": False}

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Return a tuple (number of tokens to load, whether the load is asynchronous).

        The number excludes the first `computed` tokens, and is None while a lookup is running.
        """
        remote = self._remote.waiting(request.request_id)
        if remote is None:
            kept = self._tier.matched(request, computed) if self._tier else 0
            if kept is not None:
                self._begin_checkpoints(request, computed + kept)
            return kept, bool(kept)
        if computed >= request.num_prompt_tokens - 1:  # the last token is always computed locally
            return 0, False
        count = max(0, self._stop(request, remote) - computed)
        return count, count > 0

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """Order the workers to load a request's `external` tokens into its new blocks."""
        remote = self._remote.take(request.request_id)
        if remote is None:
            self._load(request.request_id, blocks, external)
            return
        if self._tier:
            self._tier.begun(request.request_id)
        if not external:
            self._remote.end_read(request.request_id, self._orders)
            return
        stop = self._stop(request, remote)
        start, stop = stop - external, self._read_until(request, stop)
        if remote.windows:
            self._note_windows_alone(request.request_id)
        tables = self._reading(request.request_id, blocks, start, stop)
        final = self._remote.begin_read(request.request_id)
        order = PullOrder(request.request_id, remote, tables, start, stop, final)
        self._orders.pulls.append(order)

    def from_tier(self, request_id: str) -> bool:
        """Return whether the external tokens of a request come from the tier."""
        return any(order.request_id == request_id for order in self._orders.loads)

    def finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Return a tuple (whether to keep the finished request's blocks, `kv_transfer_params`)."""
        name = request.request_id
        self._remote.take(name)
        self._remote.end_read(name, self._orders)
        if name in self._pulling:  # its tokens are still in flight
            self._pulling.discard(name)
            self._orders.cancelled.append(name)
            held, params = False, None
        else:
            held = self._store(request, block_ids)
            offered, params = self._offer(request, block_ids)
            held |= offered
        if self._tier:
            self._tier.forget(name)
        if self._checkpoints:
            self._checkpoints.forget(name)
        self._windows_alone.discard(name)
        return held, params

    def _offer(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Offer a finished request that was prefilled for another engine.

        Return a tuple (whether to keep its blocks, `kv_transfer_params` of its response).
        """
        if self._alone:
            return False, None
        alone = request.request_id in self._windows_alone
        order, params = self._offers.make(request, block_ids, windows_alone=alone)
        if order is not None:
            self._orders.offers.append(order)
        return order is not None, params

    def _store(self, request: Any, block_ids: Any) -> bool:
        """Order the workers to store a finished request in the tier, if it is worth storing.

        Return whether such an order was made; vLLM must then keep the blocks until they are stored.
        """
        if self._tier is None or not any(block_ids):
            return False
        name = request.request_id
        kept = self._tier.worth_keeping(request, windows_alone=name in self._windows_alone)
        if kept is not None:
            keys, start, stop = kept
            tables = self._groups.tables(block_ids, stop)
            self._orders.stores.append(StoreOrder(name, keys, tables, ((start, stop),)))
        elif self._checkpoints and self._checkpoints.holds(name):
            # vLLM steps until the request is stored, so its checkpoints are reported too.
            self._orders.stores.append(StoreOrder(name, {}, (), ()))
        else:
            return False
        return True

    def _begin_checkpoints(self, request: Any, computed: int) -> None:
        """Begin to store checkpoints of a request that is about to run.

        Do nothing if the tier has not looked up the request.
        """
        if self._checkpoints is None or self._tier is None:
            return
        chain = self._tier.running(request.request_id)
        if chain is not None:
            attention = self._tier.attention(request.request_id)
            self._checkpoints.begin(request, chain, computed, attention)

    def _load(self, request_id: str, blocks: Any, external: int) -> None:
        """Order the workers to load the last `external` tokens of a prefix found in the tier."""
        found = self._tier.take(request_id, wanted=external > 0) if self._tier else None
        if self._tier is not None and found is not None:
            start = found.tokens - external
            if self._tier.has_windows:
                self._note_windows_alone(request_id)
            tables = self._reading(request_id, blocks, start, found.tokens)
            order = LoadOrder(request_id, found.pin, found.keys, tables, start, found.tokens)
            self._orders.loads.append(order)

    def _reading(self, request_id: str, blocks: Any, start: int, stop: int) -> Tables:
        """Mark a request as in flight, and return the block tables of its tokens.

        Workers read tokens start .. stop - 1 into these blocks.
        """
        self._groups.exclude_from_prefix_cache(
            request_id, start, stop, windows_alone=request_id in self._windows_alone
        )
        self._pulling.add(request_id)
        return self._groups.tables(blocks.get_block_ids(), stop)

    def reset_tier(self) -> bool | None:
        """Invalidate the tier's content and return True; return None if there is no tier."""
        if self._tier is None:
            return None
        self._tier.reset()
        if self._checkpoints:
            self._checkpoints.forget_all()
        return True

    # -- steps ----------------------------------------------------------------------------

    def take_orders(self) -> StepOrders:
        """Return the orders for the workers in this step, and start a new list."""
        orders, self._orders = self._orders, StepOrders()
        return orders

    def scheduled(self, scheduler_output: Any) -> None:
        """Order the workers to store the checkpoints that this step computes.

        Workers get the order with the next step.
        """
        if self._checkpoints:
            self._orders.stores += self._checkpoints.scheduled(scheduler_output)

    def stored(self, checkpoints: Mapping[int, int]) -> None:
        """Record how many workers have stored checkpoints of running requests."""
        if self._checkpoints:
            self._checkpoints.stored(checkpoints)

    def sent(self, requests: Any) -> None:
        """Record that peers have read `requests`, or that the tier has stored them.

        vLLM then frees the blocks of these requests.
        """
        for request_id in requests or ():
            self._offers.sent(request_id)
            if self._tier is not None:
                self._tier.stored(request_id)

    def take_events(self) -> list[BlockEvent]:
        """Return events for blocks that the tier stored or removed since the last call."""
        return [] if self._tier is None else self._tier.take_events()

    def received(self, requests: Any) -> None:
        """Record that the loads of `requests` have finished or failed."""
        for request_id in requests or ():
            self._remote.end_read(request_id, self._orders)
            self._pulling.discard(request_id)
            if self._tier is not None:
                self._tier.loaded(request_id)

    def close(self) -> None:
        """Close the tier."""
        if self._tier is not None:
            self._tier.close()

    # -- inside ---------------------------------------------------------------------------

    def _stop_short(self, request: Any, params: dict[str, Any]) -> None:
        """Remove the last tokens of a prompt if the decode engine has to compute them itself."""
        left_out = self._left_out
        if left_out < 1 or params.get(_SHORTER) or request.num_prompt_tokens <= left_out:
            return
        if request.prompt_token_ids is None:
            log.warning(
                "prompt not shortened request=%r: it has embeddings instead of tokens",
                request.request_id,
            )
            return
        # Siblings may share the list and the dictionary, so they are replaced.
        request.prompt_token_ids = request.prompt_token_ids[:-left_out]
        del request._all_token_ids[-left_out:]
        request.num_prompt_tokens -= left_out
        request.max_tokens = 1
        request.kv_transfer_params = params | {_SHORTER: True}

    def _stop(self, request: Any, remote: RemoteRequest) -> int:
        """Return how many tokens of a prompt may come from another engine."""
        return int(min(request.num_prompt_tokens - self._left_out, remote.tokens))

    def _read_until(self, request: Any, stop: int) -> int:
        """Return how many tokens to read: `stop`, or `stop - 1` if the last token is not needed.

        vLLM recomputes the prompt's last token, so the last token need not be read unless it
        completes a block: other requests may reuse that block before the token is recomputed.
        Reading one token less saves thousands of short runs if K is transposed.
        """
        last = stop == request.num_prompt_tokens
        return stop - int(last and self._groups.end_inside_blocks(stop))

    def _note_windows_alone(self, request_id: str) -> None:
        """Record that only the windows of a request were read from another engine.

        Do nothing unless vLLM keeps all tokens of some window layers.
        """
        if self._groups.windows_kept_whole:
            self._windows_alone.add(request_id)


def _balances_requests(parallel: Any) -> bool:
    """Return whether vLLM spreads the siblings of a request over data-parallel ranks."""
    ranks = getattr(parallel, "data_parallel_size", 1)
    return ranks > 1 and not getattr(parallel, "data_parallel_external_lb", False)
