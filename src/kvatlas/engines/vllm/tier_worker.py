"""A worker's side of the tier: requests are read from it and kept in it, beside the engine."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvatlas.engines.vllm.ended_requests import EndedRequests
from kvatlas.engines.vllm.orders import LoadOrder, StepOrders, StoreOrder
from kvatlas.engines.vllm.prefix_tier import PrefixTier
from kvatlas.errors import AtlasError

log = logging.getLogger("kvatlas.vllm")

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
    """Reads requests from a tier into an engine's blocks, and keeps finished ones in it."""

    def __init__(self, tier: PrefixTier, ended: EndedRequests) -> None:
        self._tier, self._ended = tier, ended
        self._loading = ThreadPoolExecutor(_LOADING, thread_name_prefix="kvatlas-load")
        self._storing = ThreadPoolExecutor(1, thread_name_prefix="kvatlas-store")
        self._counts = TierCounts()
        self._counts_lock = threading.Lock()

    def carry_out(self, orders: StepOrders) -> None:
        """Begin what a step has ordered."""
        for load in orders.loads:
            self._loading.submit(self._load, load)
        for store in orders.stores:
            self._storing.submit(self._store, store)

    def take_counts(self) -> TierCounts:
        """What was counted since the last look."""
        with self._counts_lock:
            counts, self._counts = self._counts, TierCounts()
        return counts

    def close(self) -> None:
        """Finish what was ordered."""
        self._loading.shutdown(wait=True)
        self._storing.shutdown(wait=True)

    def _load(self, order: LoadOrder) -> None:
        begun, failed = time.monotonic(), True
        try:
            self._tier.load(order.found, order.tables, order.start)
            failed = False
        except AtlasError as refusal:
            log.warning("not read from the tier request=%r: %s", order.request_id, refusal)
        except Exception:
            log.exception("a read from the tier failed request=%r", order.request_id)
        finally:
            order.found.let_go()
            tokens = 0 if failed else order.stop - order.start
            seconds = time.monotonic() - begun
            self._count(
                tier_loads=not failed, tier_tokens=tokens, tier_seconds=seconds,
                tier_failures=failed,
            )  # fmt: skip
            self._ended.arrived(order.request_id, failed=failed)

    def _store(self, order: StoreOrder) -> None:
        failed = True
        try:
            failed = bool(self._tier.store(order.keys, order.tables, order.start, order.stop))
            if failed:
                log.info("no room in the tier request=%r", order.request_id)
        except AtlasError as refusal:
            log.warning("not kept in the tier request=%r: %s", order.request_id, refusal)
        except Exception:
            log.exception("a request was not kept request=%r", order.request_id)
        finally:
            self._count(tier_stores=not failed, tier_failures=failed)
            self._ended.sent(order.request_id)

    def _count(self, **amounts: float) -> None:
        with self._counts_lock:
            for name, amount in amounts.items():
                setattr(self._counts, name, getattr(self._counts, name) + amount)
