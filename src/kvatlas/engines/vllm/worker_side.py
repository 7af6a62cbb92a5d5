"""The worker's part of the connector: one rank's node, its offers and its reads.

The engine's thread never waits for a peer. Background threads open sessions and wait for
transfers, and each step only collects what has ended. A failed read is reported once no transfer
can write to its blocks any longer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from kvatlas.engines.vllm.ended_requests import Ended, EndedRequests
from kvatlas.engines.vllm.lingering_releases import LingeringReleases
from kvatlas.engines.vllm.orders import OfferOrder, PullOrder, RemoteRequest, StepOrders
from kvatlas.engines.vllm.sessions import EngineSessions
from kvatlas.engines.vllm.settings import ConnectorSettings
from kvatlas.engines.vllm.thread_cores import ReadingThreads, free_cores, making_threads_for
from kvatlas.errors import AtlasError
from kvatlas.models import CacheIdentity
from kvatlas.planning import Plan
from kvatlas.wire import HOST, Memory, Node, Session, Transfer, make_transport

log = logging.getLogger("kvatlas.vllm")

_AT_ONCE = 64
"""Maximum number of concurrent reads."""
_LONGEST_QUARANTINE = 600.0
"""Seconds after which a read in quarantine is reported as ended."""
_READING_SECONDS, _OFFERING_SECONDS = 4e-3, 1e-3
"""Seconds per step for which an idle engine waits: for a read to end, or for an offer to end."""
_LINGER_SECONDS = 2.0
"""Seconds for which an offer is kept after its last known reader, for late siblings."""


@dataclass
class PullCounts:
    """Counts of reads and offers since the last collection, for vLLM's statistics."""

    pulls: int = 0
    failures: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    expired: int = 0


class _Pull:
    """A read in flight, which can be cancelled before or after it starts."""

    def __init__(self, order: PullOrder) -> None:
        self.order = order
        self.transfer: Transfer | None = None
        self._cancelled = False
        self._lock = threading.Lock()

    def begin(self, start: Callable[[], Transfer]) -> Transfer | None:
        """Start and return the transfer; return None if the read has already been cancelled."""
        with self._lock:
            if not self._cancelled:
                self.transfer = start()
            return self.transfer

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
        if self.transfer is not None:
            self.transfer.cancel()


class WorkerSide:
    """The part of the connector that runs in the process of one rank."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        memory: Memory,
        settings: ConnectorSettings,
        *,
        port: int,
        identity: CacheIdentity | None,
        ended: EndedRequests | None = None,
    ) -> None:
        """Start one rank's node, which listens on the first port of the settings plus `port`.

        `identity` is the identity of the engine's caches. It may be None only if the settings
        accept peers with any identity.
        `ended` collects finished transfers.
        """
        self._settings = settings
        cores = free_cores()
        self._reading = ReadingThreads(cores, behind=memory.device == HOST)
        with making_threads_for(cores):
            self.node = Node(
                plan,
                rank=rank,
                memory={0: memory},
                transport=make_transport(settings.transport, **settings.transport_options),
                listen=settings.listen_at(port),
                secret=settings.secret(),
                unprotected=settings.unprotected,
                piece=settings.piece,
                buffers=settings.buffers,
                identity=identity,
                check_identity=settings.check_identity,
            )
        self.endpoint = settings.advertised(self.node.endpoint)
        self._background = ThreadPoolExecutor(
            _AT_ONCE, thread_name_prefix="kvatlas-vllm", initializer=self._reading.join
        )
        self._sessions = EngineSessions(
            self.node, timeout=settings.pull_seconds, close=self._background.submit
        )
        self._releases = LingeringReleases(self._release_in_background, seconds=_LINGER_SECONDS)
        self._pulls: dict[str, _Pull] = {}
        self._offered: dict[str, str] = {}
        """For the name of each offer, the id of the offered request in this engine."""
        self._ended = ended or EndedRequests()
        self._counts = PullCounts()
        self._counts_lock = threading.Lock()

    def carry_out(self, orders: StepOrders, *, idle: bool = False) -> None:
        """Carry out the orders of a step: start and cancel transfers, keep and release offers.

        If `idle` is true, the engine computes no tokens, and transfers may use its cores.
        """
        self.node.scatter_threads = self.node.transport.copy_threads = 2 if idle else 1
        self._reading.make_room(computing=not idle)
        for offer in orders.offers:
            self._offer(offer)
        for remote in orders.let_go:
            self._release_in_background(remote)
        for name in orders.keep:
            self._releases.cancel(name)
        for remote in orders.release_soon:
            self._releases.add(remote)
        for order in orders.pulls:
            pull = self._pulls[order.request_id] = _Pull(order)
            self._background.submit(self._run, pull)
        for request_id in orders.cancelled:
            if request_id in self._pulls:
                self._pulls[request_id].cancel()

    def take_ended(self, *, idle: bool = False) -> Ended:
        """Return the requests whose transfers have ended since the last step.

        If `idle` is true, wait briefly for a transfer to end. An idle engine would otherwise poll,
        and compete with the reading threads for its core and the interpreter lock.
        """
        seconds = _READING_SECONDS if self._pulls else _OFFERING_SECONDS if self._offered else 0.0
        ended = self._ended.take(seconds if idle else 0.0)
        for request_id in ended.received:
            self._pulls.pop(request_id, None)
        return ended

    def take_counts(self) -> PullCounts:
        """Return the counts since the last call, and reset them."""
        with self._counts_lock:
            counts, self._counts = self._counts, PullCounts()
        return counts

    def close(self) -> None:
        """Cancel reads in flight, end all offers, and close the node."""
        for pull in list(self._pulls.values()):
            pull.cancel()
        self._releases.flush()
        self._background.shutdown(wait=True)
        self._reading.leave()
        self._sessions.close_all()
        self.node.close()

    # -- offers ---------------------------------------------------------------------------

    def _offer(self, order: OfferOrder) -> None:
        tables = dict(enumerate(order.tables))
        self._offered[order.name] = order.request_id
        seconds = self._settings.lease_seconds
        try:
            self.node.offer(
                order.name, tables, order.tokens, timeout=seconds, released=self._released
            )
        except AtlasError as refusal:
            # A reader then recomputes or fails, depending on its kv_load_failure_policy.
            log.error("offer failed request=%r: %s", order.request_id, refusal)
            self._released(order.name, "refused")

    def _released(self, name: str, why: str) -> None:
        """Report that the offer `name` has ended, so that vLLM may reuse its blocks."""
        if why == "expired":
            self._count(expired=1)
        self._ended.sent(self._offered.pop(name))

    # -- reads ----------------------------------------------------------------------------

    def _run(self, pull: _Pull) -> None:
        """Pull a request's blocks from another engine, and report the outcome.

        Runs in a background thread.
        """
        order, outcome = pull.order, "failed"
        try:
            with self._sessions.use(order.remote.endpoints, order.remote.request) as session:
                try:
                    outcome = "received" if self._read(pull, session) else "failed"
                finally:
                    if outcome == "failed" and order.final:
                        self._release_remote(session, order.remote)
        except AtlasError as refusal:
            log.warning("read failed request=%r: %s", order.request_id, refusal)
        except Exception:
            log.exception("read failed with an unexpected error request=%r", order.request_id)
        finally:
            self._count_pull(pull, outcome)
            self._ended.arrived(order.request_id, failed=outcome == "failed")

    def _read(self, pull: _Pull, session: Session) -> bool:
        """Pull a request's blocks; return False if the pull was cancelled before it started.

        Raise if the transfer fails. No bytes arrive after this method returns or raises.
        """
        order, settings = pull.order, self._settings
        # A pull of all tokens without a list of layers ends the offer even if it is not final.
        layers = None if order.final else tuple(self.node.plan.layers)
        transfer = pull.begin(
            lambda: session.pull(
                order.remote.request,
                destination_blocks=dict(enumerate(order.tables)),
                tokens=(order.start, order.stop),
                layers=layers,
                timeout=settings.pull_seconds,
                how=settings.how,
                checksums=settings.checksums,
                final=order.final,
                wait_for_offer=settings.wait_for_offer,
                patient=True,
            )
        )
        if transfer is None:
            return False
        try:
            transfer.carry_out()
            transfer.wait()
        finally:
            if not transfer.wait_released(_LONGEST_QUARANTINE):
                log.error("transfer still in flight at the deadline request=%r", order.request_id)
        return True

    def _release_in_background(self, remote: RemoteRequest) -> None:
        with suppress(RuntimeError):  # the worker is closing: the offer expires
            self._background.submit(self._let_go, remote)

    def _let_go(self, remote: RemoteRequest) -> None:
        try:
            with self._sessions.use(remote.endpoints, remote.request) as session:
                session.release(remote.request).wait()
        except AtlasError as refusal:
            log.warning("release of an offer failed request=%r: %s", remote.request, refusal)

    def _release_remote(self, session: Session, remote: RemoteRequest) -> None:
        """Release another engine's offer; if the engine cannot be reached, the offer expires."""
        with suppress(AtlasError):
            session.release(remote.request)

    def _count_pull(self, pull: _Pull, outcome: str) -> None:
        transfer = pull.transfer
        moved, seconds = (transfer.moved, transfer.seconds) if transfer is not None else (0, 0.0)
        failed = outcome == "failed"
        self._count(pulls=not failed, failures=failed, nbytes=moved, seconds=seconds)

    def _count(self, **amounts: float) -> None:
        with self._counts_lock:
            for name, amount in amounts.items():
                setattr(self._counts, name, getattr(self._counts, name) + amount)
