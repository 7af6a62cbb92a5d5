"""The scheduler's part of the connector: which tokens to load, from where, which blocks to keep.

A decode engine always computes the last token of a prompt, even if it has read that token's cache.
This token needs the windows and recurrent states from before it. For a model with windows or
recurrent layers, the prefill engine therefore omits the last token.
"""

from __future__ import annotations

import logging
import secrets
import time
from typing import Any, NamedTuple

from kvatlas.engines.vllm.layer_specs import seen_by_group
from kvatlas.engines.vllm.offer_readers import OfferReaders, parent_of
from kvatlas.engines.vllm.orders import (
    VERSION,
    LoadOrder,
    OfferOrder,
    PullOrder,
    RemoteRequest,
    StepOrders,
    StoreOrder,
    Tables,
    prompt_digest,
)
from kvatlas.engines.vllm.prefix_tier import PrefixTier
from kvatlas.engines.vllm.request_context import request_context
from kvatlas.engines.vllm.tier_scheduler import PATIENCE, TierScheduler
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import ceil_div
from kvatlas.pool import BlockEvent
from kvatlas.specs import Visibility

log = logging.getLogger("kvatlas.vllm")

_NULL_BLOCK = 0
"""The block id that vLLM enters for positions that a request does not keep."""
_SHORTER = "_kvatlas_stops_short"
_FINISHED = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")


class _MadeOffer(NamedTuple):
    """An offer that sibling requests with the same prompt share."""

    request_id: str
    remote: RemoteRequest
    params: dict[str, Any]
    made: float


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
        """Set up the scheduler of one engine.

        `tier` stores finished requests. An engine that is `alone` exchanges no caches with others.
        Workers keep an offer for `lease_seconds`.
        """
        self._lease_seconds = lease_seconds
        self._spreads_siblings = _balances_requests(vllm_config.parallel_config)
        self._alone = alone
        self._config = kv_cache_config
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self._caches_prefixes = bool(vllm_config.cache_config.enable_prefix_caching)
        self._groups = [
            TransferGroup(group.kv_cache_spec, index)
            for index, group in zip(
                kv_cache_config.transfer_group_ids, kv_cache_config.transfer_groups, strict=True
            )
        ]
        # Drafters of several modules look ahead: their cache of the last tokens is speculative.
        ahead = getattr(vllm_config, "num_prefill_lookahead_tokens", 0) - 1
        self._left_out = max(ahead, int(any(group.partial for group in self._groups)))
        self._ahead = ahead
        self._guesses = getattr(vllm_config, "speculative_config", None) is not None
        self._tier: TierScheduler | None = None
        if tier is not None:
            self.use_tier(tier)
        self._managers: Any = None
        self._endpoints: tuple[str, ...] = ()
        self._remote: dict[str, RemoteRequest] = {}
        """Requests that may be read from another engine, until their blocks are allocated."""
        self._readers = OfferReaders()
        """Local readers of other engines' offers; an offer is released after its last reader."""
        self._made_offers: dict[str, _MadeOffer] = {}
        """This engine's offers by the parent of the request, until workers have sent them."""
        self._pulling: set[str] = set()
        """Requests in flight from another engine or from the tier."""
        self._windows_alone: set[str] = set()
        """Requests of which only windows were read, although this engine keeps all tokens."""
        self._orders = StepOrders()

    # -- startup --------------------------------------------------------------------------

    def set_endpoints(self, endpoints: dict[tuple[int, int], str]) -> None:
        """Record the endpoints of this engine's ranks, by stage and tensor-parallel rank."""
        self._endpoints = tuple(endpoints[key] for key in sorted(endpoints))

    def use_tier(self, tier: PrefixTier, patience: float = PATIENCE, *, keeps: bool = True) -> None:
        """Look up requests in a tier, and store finished requests in it if `keeps` is true.

        A request waits for its lookup for at most `patience` seconds.
        """
        ahead, guesses = self._ahead, self._guesses
        made = TierScheduler(tier, ahead=ahead, guesses=guesses, patience=patience)
        made.keeps &= keeps
        self._tier = made

    def bind_manager(self, kv_cache_manager: Any) -> None:
        """Bind vLLM's block managers, which record the cached blocks of each group."""
        self._managers = kv_cache_manager.coordinator.single_type_managers

    # -- requests -------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Register a request that is read from another engine or prefilled for one."""
        params = request.kv_transfer_params or {}
        if self._alone:
            return
        if params.get("do_remote_decode"):
            self._stop_short(request, params)
        if params.get("do_remote_prefill"):
            try:
                self._expect(request, RemoteRequest.read(params))
            except AtlasError as refusal:
                log.warning(
                    "computing the request locally request=%r: %s", request.request_id, refusal
                )
                # Siblings may share the dictionary, so it is replaced instead of changed.
                request.kv_transfer_params = params | {"do_remote_prefill": False}

    def _expect(self, request: Any, remote: RemoteRequest) -> None:
        """Add a request to an offer's readers; raise if it must not read the offer."""
        try:
            self._check(remote, request)
        except AtlasError:
            # Another request of the same client may have the right prompt.
            if not self._readers.has_readers(remote):
                self._release_soon(remote)
            raise
        self._remote[request.request_id] = remote
        self._readers.add(request.request_id, remote)
        self._orders.release_soon = [
            one for one in self._orders.release_soon if one.request != remote.request
        ]
        self._orders.keep.append(remote.request)

    def _reads_no_more(self, request_id: str) -> None:
        """Remove a reader from its offer, and release the offer after its last known reader."""
        remote = self._readers.remove(request_id)
        if remote is None:
            return
        if parent_of(request_id) is None:
            self._orders.let_go.append(remote)
        elif not self._spreads_siblings:
            self._release_soon(remote)
        # Otherwise another data-parallel rank may still read the offer, so it must expire.

    def _release_soon(self, remote: RemoteRequest) -> None:
        self._orders.keep = [name for name in self._orders.keep if name != remote.request]
        self._orders.release_soon.append(remote)

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Return the number of tokens to load, and whether they load asynchronously.

        The number excludes the `computed` tokens. It is None while a lookup is running.
        """
        remote = self._remote.get(request.request_id)
        if remote is None:
            kept = self._tier.matched(request, computed) if self._tier else 0
            return kept, bool(kept)
        if computed >= request.num_prompt_tokens - 1:  # the last token is always computed locally
            return 0, False
        count = max(0, self._stop(request, remote) - computed)
        return count, count > 0

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """Order the load of a request's external tokens into its new blocks, if it has any."""
        remote = self._remote.pop(
            request.request_id, None
        )  # only once: a failed read is recomputed
        if remote is None:
            self._load(request.request_id, blocks, external)
            return
        if self._tier:
            self._tier.begun(request.request_id)
        if not external:
            self._reads_no_more(request.request_id)
            return
        stop = self._stop(request, remote)
        start, stop = stop - external, self._read_until(request, stop)
        if remote.windows:
            self._note_windows_alone(request.request_id)
        tables = self._reading(request.request_id, blocks, start, stop)
        final = self._readers.reads_alone(request.request_id)
        if final:  # the read itself releases the offer
            self._readers.remove(request.request_id)
        order = PullOrder(request.request_id, remote, tables, start, stop, final)
        self._orders.pulls.append(order)

    def from_tier(self, request_id: str) -> bool:
        """Return whether the external tokens of a request come from the tier."""
        return any(order.request_id == request_id for order in self._orders.loads)

    def finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Return whether to keep a finished request's blocks, and its response parameters."""
        name = request.request_id
        self._remote.pop(name, None)
        self._reads_no_more(name)
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
        self._windows_alone.discard(name)
        return held, params

    def _offer(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Offer a finished request that was prefilled for another engine.

        Return whether to keep its blocks, and its response parameters. Siblings share one offer:
        they have the same prompt, and a client uses the parameters of only one of them.
        """
        name, params = request.request_id, request.kv_transfer_params or {}
        tokens = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
        keep = params.get("do_remote_decode") and request.status.name in _FINISHED
        if not keep or self._alone or tokens < 1 or not any(block_ids):
            return False, None
        prompt = prompt_digest(request.prompt_token_ids, tokens, request_context(request, tokens))
        parent = parent_of(name)
        shared = self._made_offers.get(parent or "")
        if shared is not None and self._is_shareable(shared, prompt, tokens):
            return False, dict(shared.params)
        offered = f"{name[:200]}/{secrets.token_hex(8)}"
        tables = self._tables(block_ids, tokens)
        self._orders.offers.append(OfferOrder(name, offered, tables, tokens))
        windows = {group.window for group in self._groups if group.window}
        if name in self._windows_alone:
            windows |= {seen for group in self._groups for seen in group.windows_kept_whole}
        told = RemoteRequest(
            version=VERSION,
            request=offered,
            tokens=tokens,
            endpoints=self._endpoints,
            windows=tuple(sorted(windows)),
            prompt=prompt,
        )
        answer = told.params(self._engine_id, block_ids)
        if parent is not None:
            self._made_offers[parent] = _MadeOffer(name, told, answer, time.monotonic())
        return True, answer

    def _is_shareable(self, offer: _MadeOffer, prompt: str, tokens: int) -> bool:
        """Return whether a sibling's offer has the same cache and does not expire soon."""
        same = (offer.remote.prompt, offer.remote.tokens) == (prompt, tokens)
        return same and time.monotonic() < offer.made + self._lease_seconds / 2

    def _store(self, request: Any, block_ids: Any) -> bool:
        """Order the store of a finished request; return whether its blocks must be kept for it."""
        if self._tier is None or not any(block_ids):
            return False
        alone = request.request_id in self._windows_alone
        kept = self._tier.worth_keeping(request, windows_alone=alone)
        if kept is None:
            return False
        keys, start, stop = kept
        tables = self._tables(block_ids, stop)
        self._orders.stores.append(StoreOrder(request.request_id, keys, tables, start, stop))
        return True

    def _load(self, request_id: str, blocks: Any, external: int) -> None:
        """Order the load of a prefix that was found in the tier."""
        found = self._tier.take(request_id, wanted=external > 0) if self._tier else None
        if self._tier is not None and found is not None:
            start = found.tokens - external
            if self._tier.has_windows:
                self._note_windows_alone(request_id)
            tables = self._reading(request_id, blocks, start, found.tokens)
            order = LoadOrder(request_id, found.pin, found.keys, tables, start, found.tokens)
            self._orders.loads.append(order)

    def _reading(self, request_id: str, blocks: Any, start: int, stop: int) -> Tables:
        """Mark a request as in flight; return the block tables that it is read into."""
        self._keep_out_of_cache(request_id, start, stop)
        self._pulling.add(request_id)
        return self._tables(blocks.get_block_ids(), stop)

    def reset_tier(self) -> bool | None:
        """Invalidate the tier's content; return None if there is no tier."""
        if self._tier is None:
            return None
        self._tier.reset()
        return True

    # -- steps ----------------------------------------------------------------------------

    def take_orders(self) -> StepOrders:
        """Return the orders for the workers in this step, and start a new list."""
        orders, self._orders = self._orders, StepOrders()
        return orders

    def sent(self, requests: Any) -> None:
        """Handle requests that peers have read or the tier has stored; vLLM frees their blocks."""
        for request_id in requests or ():
            made = self._made_offers.get(parent_of(request_id) or "")
            if made is not None and made.request_id == request_id:
                del self._made_offers[parent_of(request_id) or ""]
        if self._tier is not None:
            for request_id in requests or ():
                self._tier.stored(request_id)

    def take_events(self) -> list[BlockEvent]:
        """Return events for blocks that the tier stored or removed since the last call."""
        return [] if self._tier is None else self._tier.take_events()

    def received(self, requests: Any) -> None:
        """Handle requests whose load has finished or failed."""
        for request_id in requests or ():
            self._reads_no_more(request_id)
        self._pulling.difference_update(requests or ())
        if self._tier is not None:
            for request_id in requests or ():
                self._tier.loaded(request_id)

    def close(self) -> None:
        """Close the tier."""
        if self._tier is not None:
            self._tier.close()

    # -- inside ---------------------------------------------------------------------------

    def _stop_short(self, request: Any, params: dict[str, Any]) -> None:
        """Omit the last tokens of a prompt if the decode engine has to compute them."""
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
        """Return `stop` without the last token of the prompt, which vLLM recomputes anyway.

        If K is transposed, a single token in a block takes thousands of short runs. A token that
        completes its block is read: other requests may reuse the block before it is recomputed.
        """
        last = stop == request.num_prompt_tokens
        return stop - int(last and all(stop % group.block for group in self._groups))

    def _check(self, remote: RemoteRequest, request: Any) -> None:
        """Raise if the offer is for another prompt, adapter, salt or image."""
        context = request_context(request, remote.tokens)
        if prompt_digest(request.prompt_token_ids, remote.tokens, context) != remote.prompt:
            raise AtlasError(
                Code.UNKNOWN_REQUEST,
                "kv_transfer_params belong to another prompt, adapter, cache_salt or image",
                got=f"offer {remote.request!r} for a prompt of {request.num_prompt_tokens} tokens",
                hint="Use the parameters from the prefill response to the same request",
            )

    def _note_windows_alone(self, request_id: str) -> None:
        """Record that only the windows of sliding-window layers are read for a request."""
        if any(group.windows_kept_whole for group in self._groups):
            self._windows_alone.add(request_id)

    def _tables(self, block_ids: Any, tokens: int) -> Tables:
        """Return the block ids of all transferred groups; -1 for entries without a block."""
        return tuple(group.table(block_ids[group.index], tokens) for group in self._groups)

    def _keep_out_of_cache(self, request_id: str, start: int, stop: int) -> None:
        """Exclude blocks before a window, whose tokens were not read, from vLLM's prefix cache.

        A later request may share a shorter prefix, whose window includes these tokens.
        """
        if not self._caches_prefixes or self._managers is None:
            return
        windows_alone = request_id in self._windows_alone
        for group in self._groups:
            first = group.incomplete_blocks(start, stop, windows_alone=windows_alone)
            if first:
                cached = self._managers[group.index].num_cached_block
                cached[request_id] = max(cached.get(request_id, 0), first)


def _balances_requests(parallel: Any) -> bool:
    """Return whether vLLM sends siblings to different data-parallel ranks and their schedulers."""
    ranks = getattr(parallel, "data_parallel_size", 1)
    return ranks > 1 and not getattr(parallel, "data_parallel_external_lb", False)


class TransferGroup:
    """A cache group of vLLM whose blocks are transferred."""

    def __init__(self, spec: Any, index: int) -> None:
        specs = list((getattr(spec, "kv_cache_specs", None) or {"": spec}).values())
        kinds = {kind.__name__ for kind in type(specs[0]).__mro__}
        self.index, self.block = index, specs[0].block_size
        self.recurrent = "MambaSpec" in kinds
        self.by_position = getattr(specs[0], "mamba_cache_mode", "none") != "none"
        seen = {seen_by_group(one) for one in specs}
        whole = "FullAttentionSpec" in kinds
        self.visibility = Visibility() if whole else seen_by_group(specs[0])
        self.window = self.visibility.window or self.visibility.chunk
        self.windows_kept_whole = {
            one.window or one.chunk or 0: one for one in seen if whole and one != Visibility()
        }
        """Windows and chunks of layers that keep all tokens, by size."""
        self.partial = self.recurrent or self.window is not None

    def table(self, ids: Any, tokens: int) -> tuple[int, ...]:
        """Return the ids of blocks with a request's first tokens, or with the state after them."""
        entries = ceil_div(tokens, self.block)
        if self.recurrent and not self.by_position:
            entries = 1
        return tuple(-1 if block == _NULL_BLOCK else block for block in ids[:entries])

    def incomplete_blocks(self, start: int, stop: int, *, windows_alone: bool = False) -> int:
        """Return how many leading blocks must not be cached once tokens start .. stop - 1 are read.

        With `windows_alone`, only windows were read, also for layers that keep all tokens.

        >>> sliding = type("SlidingWindowSpec", (), {"block_size": 64, "sliding_window": 64})
        >>> TransferGroup(sliding(), 0).incomplete_blocks(0, 150)
        2
        """
        seen = [self.visibility, *(self.windows_kept_whole.values() if windows_alone else ())]
        first = max(int(one.first(stop)) for one in seen)
        return ceil_div(first, self.block) if first > start else 0
