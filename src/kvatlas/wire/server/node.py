"""`Node`: one rank's caches on the wire.

A node registers its pools with a transport, answers peers, and keeps the books: which
requests are offered and until when, which are expected, and who holds a lease. It trusts
nothing that a peer says before it was held against the peer's plan; what a peer may do is
what its lease says.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Int64s
from kvatlas.planning import Plan
from kvatlas.routing import Route, block_table, checked_rank, fingerprint, route, token_range
from kvatlas.wire import protocol as say
from kvatlas.wire.leases import Expected, Leases, Offer, Released
from kvatlas.wire.memory_copy import as_bytes
from kvatlas.wire.metrics import Metrics
from kvatlas.wire.peers import Peer, Plans, check_memory, plan_hash
from kvatlas.wire.rpc import Server, log
from kvatlas.wire.server.answers import Answers
from kvatlas.wire.staging import Bytes
from kvatlas.wire.transports.base import STAGING, Memory, Transport

_ROUTES = 128
_LONGEST = 3600.0


def pools_for(plan: Plan, rank: int, transport: Transport) -> dict[int, Bytes]:
    """Memory for the pools of a rank that peers of a transport can reach, by index."""
    stage = rank // plan.tp
    return {p.index: transport.allocate(p.nbytes) for p in plan.pools if p.stage == stage}


class Node:
    """One rank of a plan, reachable by others.

    `memory` says where the rank's pools are, by index; `listen` is where peers knock. With
    a `secret`, both ends sign what they say. `slots` pieces of `piece` bytes are kept for
    staged transfers. A process that keeps its `name` over a restart takes the place of the
    one that was: peers give back what that one had leased.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        rank: int = 0,
        memory: Mapping[int, Memory],
        transport: Transport,
        name: str | None = None,
        listen: str = "tcp://127.0.0.1:0",
        secret: bytes | None = None,
        piece: int = 4 << 20,
        slots: int = 8,
    ) -> None:
        self.plan, self.rank = plan, rank
        self.transport, self.secret, self.piece = transport, secret, piece
        self.run = say.new_key()
        self.name = name or f"kvatlas-{self.run.hex()[:12]}"
        _refuse_dust(piece)
        self.metrics = Metrics()
        self.leases = Leases(lambda lease: self._give_back(lease.slots))
        self.plans = Plans()
        self.plan_hash = plan_hash(plan)
        self.offers: dict[str, Offer] = {}
        self.expected: dict[str, Expected] = {}
        self.slots = slots
        self._free = list(range(slots))
        self.memory = dict(memory)
        check_memory(plan, checked_rank(plan, rank, "node"), self.memory)
        self._routes: OrderedDict[tuple[bytes, str], Route] = OrderedDict()
        self.lock = threading.RLock()
        try:
            self.staging = transport.allocate(piece * slots)
            self.memory[STAGING] = Memory(self.staging.ctypes.data, self.staging.nbytes)
            self.pools = {i: as_bytes(at) for i, at in self.memory.items() if at.device == 0}
            transport.register(self.memory)
            self._server = Server(listen, Answers(self), secret=secret, idle=self._sweep)
        except BaseException:
            transport.close()
            raise

    @property
    def endpoint(self) -> str:
        """Where peers reach this node."""
        return self._server.endpoint

    def offer(
        self,
        request: str,
        blocks: Any,
        tokens: Any,
        *,
        seconds: float = 30.0,
        released: Released | None = None,
    ) -> None:
        """Let peers read a request's blocks, which stay untouched until they are released.

        `released` is called once, with the request and why: all ranks that read from this
        one have done so, or time is up. Only then may the blocks be used for anything else.
        """
        start, stop = token_range(tokens, self.plan.max_len)
        found = self._tables(blocks)
        with self.lock:
            self._refuse_known(request, self.offers)
            until = time.monotonic() + min(seconds, _LONGEST)
            self.offers[request] = Offer(request, found, start, stop, until, released)

    def withdraw(self, request: str) -> None:
        """End an offer before its time; transfers that are under way fail."""
        self.release(request, "withdrawn")

    def expect(self, request: str, blocks: Any, tokens: Any, *, source: Plan) -> Expected:
        """Let peers of a source plan push a request into these blocks; `ready` says when."""
        start, stop = token_range(tokens, self.plan.max_len)
        found = self._tables(blocks)
        sources = frozenset(route(source, self.plan).sources(self.rank))
        known = plan_hash(source)
        with self.lock:
            self._refuse_known(request, self.expected)
            self.expected[request] = Expected(request, found, start, stop, known, sources)
            return self.expected[request]

    def forget(self, request: str) -> None:
        """Stop waiting for a request; its blocks may be used again once this returns."""
        with self.lock:
            self.expected.pop(request, None)
            self.leases.drop_request(request, "push")

    def close(self) -> None:
        """Leave: nobody is answered, nothing is leased, no memory stays registered."""
        self._server.close()
        for request in list(self.offers):
            self.release(request, "closed")
        self.leases.drop_all()
        self.expected.clear()
        self.transport.close()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what this node says of itself --------------------------------------------------

    def hello(self, *, with_plan: bool) -> say.Hello:
        """Who this is."""
        return say.Hello(
            version=say.VERSION,
            name=self.name,
            run=self.run,
            fingerprint=fingerprint(self.plan),
            plan_hash=self.plan_hash,
            plan=self.plan.to_json() if with_plan else None,
            rank=self.rank,
            spots=tuple(
                say.Spot(index=i, address=at.address, nbytes=at.nbytes, device=at.device)
                for i, at in self.memory.items()
            ),
            transport=self.transport.name,
            metadata=self.transport.publish(),
        )

    def route_from(self, peer: Peer) -> Route:
        """The route from a peer to this node."""
        return self._route(peer, "from")

    def route_to(self, peer: Peer) -> Route:
        """The route from this node to a peer."""
        return self._route(peer, "to")

    def _route(self, peer: Peer, way: str) -> Route:
        key = (peer.plan_hash, way)
        with self.lock:
            if key not in self._routes:
                ends = (peer.plan, self.plan) if way == "from" else (self.plan, peer.plan)
                self._routes[key] = route(*ends)
                while len(self._routes) > _ROUTES:
                    self._routes.popitem(last=False)
            self._routes.move_to_end(key)
            return self._routes[key]

    @contextmanager
    def borrowed(self, slots: list[int]) -> Iterator[list[int]]:
        """Staging slots that were taken, for a while."""
        try:
            yield slots
        finally:
            self._give_back(slots)

    def take(self, many: int) -> list[int]:
        """Staging slots: as many as asked, or none."""
        with self.lock:
            if many > len(self._free):
                return []
            return [self._free.pop() for _ in range(many)]

    def _give_back(self, slots: Iterable[int]) -> None:
        with self.lock:
            self._free += slots

    # -- books --------------------------------------------------------------------------

    def release(self, request: str, why: str) -> None:
        """End an offer and its leases, and tell whoever made it."""
        with self.lock:
            offer = self.offers.pop(request, None)
            self.leases.drop_request(request, "pull")
        if offer is not None and offer.released is not None:
            try:
                offer.released(request, why)
            except Exception:
                # Whoever made the offer has failed; peers and other requests have not.
                log.exception("a release failed request=%s why=%s", request, why)

    def _sweep(self) -> None:
        self.leases.sweep()
        now = time.monotonic()
        for request in [r for r, offer in list(self.offers.items()) if offer.expires <= now]:
            log.warning("expired request=%s", request)
            self.release(request, "expired")

    def _tables(self, blocks: Any) -> dict[int, Int64s]:
        given = blocks if isinstance(blocks, Mapping) else {0: blocks}
        return {int(group): block_table(ids, f"group {group}") for group, ids in given.items()}

    def _refuse_known(self, request: str, books: Mapping[str, object]) -> None:
        if not isinstance(request, str) or not 1 <= len(request) <= 256:
            raise AtlasError(
                Code.UNKNOWN_REQUEST,
                "A request has a name of 1 to 256 characters",
                got=repr(request)[:300],
                hint="Use the engine's request id",
            )
        if request in books:
            raise AtlasError(
                Code.TWICE,
                "A request is offered or expected once at a time",
                got=request,
                hint="Withdraw or forget it first",
            )


def _refuse_dust(piece: int) -> None:
    if piece < say.SMALLEST_PIECE:
        raise AtlasError(
            Code.BAD_SIZE,
            f"A staging slot has at least {say.SMALLEST_PIECE} bytes",
            got=piece,
            hint="Leave it out, or give slots=0 for no staging",
        )
