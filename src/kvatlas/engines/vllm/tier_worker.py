"""A worker's side of the tier: requests are read from it and kept in it, beside the engine.

Where the caches are on a GPU, a step marks what the engine has told it so far. A request is
stored behind that, since its last blocks may not be written yet, and read behind it, since
whoever had its blocks before may still be reading them. What was read is there before it is
reported, so that kernels which are launched later see it.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvatlas.engines.vllm.ended_requests import EndedRequests
from kvatlas.engines.vllm.orders import LoadOrder, StepOrders, StoreOrder
from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.tier import Converting, StoreTier, TierClient
from kvatlas.tier.hit import Hit
from kvatlas.tier.store_hit import StoreHit
from kvatlas.wire import Memory
from kvatlas.wire.memory_copy import is_on_gpu
from kvatlas.wire.transports.cuda_driver import load_driver
from kvatlas.wire.transports.device_marks import DeviceMarks

log = logging.getLogger("kvatlas.vllm")

_SLOW = 1.0
"""Seconds of a store that fails after which others are not tried: requests hold their blocks."""
_PAUSE = 5.0
"""Seconds for which they are not."""
_LOADING = 2
"""Requests that are read at once; one is stored beside them."""


@dataclass
class TierCounts:
    """What went to a tier and came from it since the last look."""

    tier_loads: int = 0
    tier_tokens: int = 0
    tier_seconds: float = 0.0
    tier_stores: int = 0
    tier_failures: int = 0


class TierWorker:
    """Reads requests from a tier into one rank's blocks, and keeps finished ones in it.

    Without a tier, which may be unusable, everything that is ordered fails.
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
        """With `convert`, what is read from the tier becomes what this rank keeps."""
        self._tier, self._plan, self._rank = tier, own, rank
        self._convert = convert
        self._pools, self._ended = {0: memory}, ended
        on_gpu = is_on_gpu(self._pools)
        self._marks = DeviceMarks(load_driver(), memory.number) if on_gpu else None
        self._loading = ThreadPoolExecutor(_LOADING, thread_name_prefix="kvatlas-load")
        self._storing = ThreadPoolExecutor(1, thread_name_prefix="kvatlas-store")
        self._store_from = 0.0
        self._counts = TierCounts()
        self._counts_lock = threading.Lock()

    def carry_out(self, orders: StepOrders) -> None:
        """Begin what a step has ordered, in the thread that launches the engine's kernels."""
        if not orders.loads and not orders.stores:
            return
        mark = None if self._marks is None else self._marks.mark()
        for load in orders.loads:
            self._loading.submit(self._load, load, mark)
        for store in orders.stores:
            self._storing.submit(self._store, store, mark)

    def take_counts(self) -> TierCounts:
        """What was counted since the last look."""
        with self._counts_lock:
            counts, self._counts = self._counts, TierCounts()
        return counts

    def close(self) -> None:
        """Finish what was ordered, and let go of the tier."""
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
            log.warning("not read from the tier request=%r: %s", order.request_id, refusal)
        except Exception:
            log.exception("a read from the tier failed request=%r", order.request_id)
        finally:
            tokens = 0 if failed else order.stop - order.start
            seconds = time.monotonic() - begun
            self._count(
                tier_loads=not failed, tier_tokens=tokens, tier_seconds=seconds,
                tier_failures=failed,
            )  # fmt: skip
            self._ended.arrived(order.request_id, failed=failed)

    def _fetch(self, tier: TierClient | StoreTier, order: LoadOrder) -> None:
        """Read what the scheduler has pinned; where the pin is gone, what is there still."""
        if isinstance(tier, TierClient):
            try:
                with tier.join(order.pin) as joined:
                    self._fill(joined, order)
                return
            except AtlasError as refusal:
                log.info("looked up again request=%r: %s", order.request_id, refusal)
        with tier.pin(order.keys, order.stop) as hit:
            self._fill(hit, order)

    def _fill(self, hit: Hit | StoreHit, order: LoadOrder) -> None:
        if hit.tokens < order.stop:
            hint = "Compute them, or have vLLM do so: kv_load_failure_policy=recompute"
            got = f"{hit.tokens} of {order.stop} tokens"
            raise AtlasError(Code.MISSING_BLOCKS, "The tier has lost tokens", got=got, hint=hint)
        blocks = dict(enumerate(order.tables))
        about: dict[str, Any] = {"rank": self._rank, "blocks": blocks, "start": order.start}
        if isinstance(hit, Hit):
            hit.fetch(self._pools, self._plan, **about, convert=self._convert)
        else:  # a store's knows which of its rows are converted
            hit.fetch(self._pools, self._plan, **about)

    def _store(self, order: StoreOrder, mark: int | None) -> None:
        begun, failed = time.monotonic(), True
        try:
            if begun < self._store_from:
                return
            self._wait_for_engine(mark)
            result = self._usable().store(
                self._pools,
                self._plan,
                rank=self._rank,
                blocks=dict(enumerate(order.tables)),
                tokens=(order.start, order.stop),
                keys=order.keys,
            )
            failed = bool(result.no_room)
            if failed:
                log.info("no room in the tier request=%r", order.request_id)
        except AtlasError as refusal:
            log.warning("not kept in the tier request=%r: %s", order.request_id, refusal)
        except Exception:
            log.exception("a request was not kept request=%r", order.request_id)
        finally:
            now = time.monotonic()
            if failed and now - begun > _SLOW:
                self._store_from = now + _PAUSE
            self._count(tier_stores=not failed, tier_failures=failed)
            self._ended.sent(order.request_id)

    def _wait_for_engine(self, mark: int | None) -> None:
        """Wait until the GPU has done what a step had marked."""
        if mark is not None and self._marks is not None:
            self._marks.wait(mark)

    def _usable(self) -> TierClient | StoreTier:
        if self._tier is None:
            hint = "See the log of this worker's start"
            raise AtlasError(Code.UNREADABLE, "The tier cannot be used", got="a call", hint=hint)
        return self._tier

    def _count(self, **amounts: float) -> None:
        with self._counts_lock:
            for name, amount in amounts.items():
                setattr(self._counts, name, getattr(self._counts, name) + amount)
