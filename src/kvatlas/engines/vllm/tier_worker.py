"""A worker's use of a tier: load requests and store finished ones, in background threads.

For caches on a GPU, each step records a mark (a CUDA event) after the kernels that the engine has
launched. Stores wait for the mark, because a request's last blocks may not be written yet. Loads
wait for the mark too, because the previous owner of the blocks may still be reading them. A load is
complete before it is reported, so that kernels launched later see its data.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from kvatlas.copying.cuda_driver import load_driver
from kvatlas.copying.device_marks import DeviceMarks
from kvatlas.copying.memory_copy import is_on_gpu
from kvatlas.engines.vllm.ended_requests import EndedRequests
from kvatlas.engines.vllm.orders import LoadOrder, StepOrders, StoreOrder
from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.tier import Converting, StoreTier, TierClient
from kvatlas.tier.hit import Hit
from kvatlas.tier.store_hit import StoreHit
from kvatlas.wire import Memory

log = logging.getLogger("kvatlas.vllm")

_SLOW = 1.0
"""If a failed store took longer than this many seconds, stores pause, because they hold blocks."""
_PAUSE = 5.0
"""Seconds of that pause."""
_LOADING = 2
"""Concurrent loads; one store runs in parallel."""


@dataclass
class TierCounts:
    """Counts of loads from a tier and of stores in it, since the last collection."""

    tier_loads: int = 0
    tier_tokens: int = 0
    tier_seconds: float = 0.0
    tier_stores: int = 0
    tier_failures: int = 0


class TierWorker:
    """Load requests from a tier into one rank's blocks, and store finished requests in it.

    If the tier could not be opened, every load and store fails.
    """

    def __init__(
        self,
        tier: TierClient | StoreTier | None,
        own: Plan,
        rank: int,
        memory: Memory,
        ended: EndedRequests,
        convert: Converting | None = None,
    ) -> None:
        """Start the background threads of one rank, whose caches `own` and `memory` describe.

        `ended` collects finished loads and stores. `convert` is the conversion of loaded blocks.
        """
        self._tier, self._plan, self._rank = tier, own, rank
        self._convert = convert
        self._pools, self._ended = {0: memory}, ended
        on_gpu = is_on_gpu(self._pools)
        self._marks = DeviceMarks(load_driver(), memory.number) if on_gpu else None
        self._loading, self._storing = _threads()
        self._store_from = 0.0
        self._checkpoints: SimpleQueue[int] = SimpleQueue()
        """Checkpoints of running requests whose stores have ended."""
        self._counts = TierCounts()
        self._counts_lock = threading.Lock()

    def carry_out(self, orders: StepOrders) -> None:
        """Start a step's loads and stores; call it in the thread that launches kernels."""
        if not orders.loads and not orders.stores:
            return
        mark = None if self._marks is None else self._marks.mark()
        for load in orders.loads:
            self._loading.submit(self._load, load, mark)
        for store in orders.stores:
            self._storing.submit(self._store, store, mark)

    def take_counts(self) -> TierCounts:
        """Return the counts since the last call, and reset them."""
        with self._counts_lock:
            counts, self._counts = self._counts, TierCounts()
        return counts

    def take_checkpoints(self) -> list[int]:
        """Return the checkpoints whose stores have ended since the last call."""
        return [self._checkpoints.get() for _ in range(self._checkpoints.qsize())]

    def finish(self) -> None:
        """Wait for pending loads and stores to finish, so that nothing uses the caches."""
        before = (self._loading, self._storing)
        self._loading, self._storing = _threads()
        for threads in before:
            threads.shutdown(wait=True)

    def close(self) -> None:
        """Finish pending loads and stores, and close the tier."""
        self._loading.shutdown(wait=True)
        self._storing.shutdown(wait=True)
        if self._tier is not None:
            self._tier.close()
        if self._marks is not None:
            self._marks.close()

    def _load(self, order: LoadOrder, mark: int | None) -> None:
        begun, failed = time.monotonic(), True
        try:
            self._wait_for_engine(mark)
            self._fetch(self._usable(), order)
            failed = False
        except AtlasError as refusal:
            log.warning("load from the tier failed request=%r: %s", order.request_id, refusal)
        except Exception:
            log.exception(
                "load from the tier failed with an unexpected error request=%r", order.request_id
            )
        finally:
            tokens = 0 if failed else order.stop - order.start
            seconds = time.monotonic() - begun
            self._count(
                tier_loads=not failed, tier_tokens=tokens, tier_seconds=seconds,
                tier_failures=failed,
            )  # fmt: skip
            self._ended.arrived(order.request_id, failed=failed)

    def _fetch(self, tier: TierClient | StoreTier, order: LoadOrder) -> None:
        """Load the blocks that the scheduler pinned; if the pin is lost, look them up again."""
        if isinstance(tier, TierClient):
            try:
                with tier.join(order.pin) as joined:
                    self._fill(joined, order)
                return
            except AtlasError as refusal:
                log.info(
                    "pin lost, looking up the keys again request=%r: %s", order.request_id, refusal
                )
        with tier.pin(order.keys, order.stop) as hit:
            self._fill(hit, order)

    def _fill(self, hit: Hit | StoreHit, order: LoadOrder) -> None:
        if hit.tokens < order.stop:
            hint = 'Set kv_load_failure_policy to "recompute": vLLM then recomputes the tokens'
            got = f"{hit.tokens} of {order.stop} tokens in the tier"
            raise AtlasError(
                Code.MISSING_BLOCKS,
                "Tokens were evicted from the tier after the lookup",
                got=got,
                hint=hint,
            )
        blocks = dict(enumerate(order.tables))
        about: dict[str, Any] = {"rank": self._rank, "blocks": blocks, "start": order.start}
        if isinstance(hit, Hit):
            hit.fetch(self._pools, self._plan, **about, convert=self._convert)
        else:  # a store's hit records which of its rows need conversion
            hit.fetch(self._pools, self._plan, **about)

    def _store(self, order: StoreOrder, mark: int | None) -> None:
        begun, failed = time.monotonic(), True
        try:
            if begun < self._store_from:
                return
            self._wait_for_engine(mark)
            about: dict[str, Any] = {"rank": self._rank, "keys": order.keys}
            about["blocks"] = dict(enumerate(order.tables))
            tier, no_room = self._usable(), 0
            for span in order.spans:
                no_room += tier.store(self._pools, self._plan, tokens=span, **about).no_room
            failed = bool(no_room)
            if failed:
                log.info("not stored: the tier has no space request=%r", order.request_id)
        except AtlasError as refusal:
            log.warning("store in the tier failed request=%r: %s", order.request_id, refusal)
        except Exception:
            log.exception(
                "store in the tier failed with an unexpected error request=%r", order.request_id
            )
        finally:
            now = time.monotonic()
            if failed and now - begun > _SLOW:
                self._store_from = now + _PAUSE
            if order.spans:
                self._count(tier_stores=not failed, tier_failures=failed)
            if order.checkpoint is None:
                self._ended.sent(order.request_id)
            else:
                self._checkpoints.put(order.checkpoint)

    def _wait_for_engine(self, mark: int | None) -> None:
        """Wait until the GPU has run all kernels that were launched before `mark` was recorded."""
        if mark is not None and self._marks is not None:
            self._marks.wait(mark)

    def _usable(self) -> TierClient | StoreTier:
        if self._tier is None:
            hint = "See this worker's log for the error at startup"
            problem = "The tier could not be opened at startup"
            got = f"rank {self._rank} without an open tier"
            raise AtlasError(Code.UNREADABLE, problem, got=got, hint=hint)
        return self._tier

    def _count(self, **amounts: float) -> None:
        with self._counts_lock:
            for name, amount in amounts.items():
                setattr(self._counts, name, getattr(self._counts, name) + amount)


def _threads() -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:
    """Return two thread pools: one for loads, and one with a single thread for stores."""
    loading = ThreadPoolExecutor(_LOADING, thread_name_prefix="kvatlas-load")
    return loading, ThreadPoolExecutor(1, thread_name_prefix="kvatlas-store")
