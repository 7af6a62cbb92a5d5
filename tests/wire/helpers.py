"""What the tests of wires share: guarded pools, a small transport, and who must hold what.

`Local` moves bytes inside one process, range by range; `around` lets a test slow it down,
spoil it or stop it.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.planning import Plan, plan
from kvatlas.routing import Copy, route, scattered
from kvatlas.wire import Handle, Link, Memory, Node, Session, Transport
from kvatlas.wire.transports.handles import Done
from tests.identities import OURS
from tests.planning.models import SMALL
from tests.routing import oracle
from tests.routing.oracle import Move

GUARD = 64
Bytes = NDArray[np.uint8]
Pools = dict[int, Bytes]
Around = Callable[[Callable[[], Handle], Sequence[Copy]], Handle]
"""Called instead of an operation, with the operation and its copies."""


def as_it_is(act: Callable[[], Handle], copies: Sequence[Copy]) -> Handle:
    del copies
    return act()


class Buffers:
    """The pools of a rank, each between guard bytes."""

    def __init__(self, made: Plan, rank: int, *, seed: int = 0) -> None:
        rng = np.random.default_rng((seed, rank))
        self.whole: Pools = {
            pool.index: np.empty(pool.nbytes + 3 * GUARD, dtype=np.uint8)
            for pool in made.pools
            if pool.stage == rank // made.tp
        }
        self.first = {i: GUARD + -b.ctypes.data % GUARD for i, b in self.whole.items()}
        self.sizes = {p.index: p.nbytes for p in made.pools if p.index in self.whole}
        for index, whole in self.whole.items():
            whole[:] = 0xA5
            self.pools[index][:] = rng.integers(0, 256, self.sizes[index], dtype=np.uint8)
        self.before = self.copy()

    @property
    def memory(self) -> dict[int, Memory]:
        """Where the pools are, which also keeps them: what is freed would be given to others."""
        return {
            i: Memory(b.ctypes.data + self.first[i], self.sizes[i], owner=b)
            for i, b in self.whole.items()
        }

    @property
    def pools(self) -> Pools:
        return self.pools_of(self.whole)

    def pools_of(self, whole: Pools) -> Pools:
        """The pools alone, of all that is there or was there."""
        return {i: b[self.first[i] :][: self.sizes[i]] for i, b in whole.items()}

    def copy(self) -> Pools:
        return {index: whole.copy() for index, whole in self.whole.items()}

    def assert_untouched(self) -> None:
        for index, whole in self.whole.items():
            assert np.array_equal(whole, self.before[index]), f"pool {index} has changed"


class LocalLink(Link):
    """Copies inside one process."""

    around: Around = staticmethod(as_it_is)

    def check(self) -> None:
        assert self.open, "a link is used after it was closed"

    def _post(self, copies: Sequence[Copy]) -> Handle:
        ends = (self.peer_memory, self.own_memory)
        return self.around(lambda: self._move(copies, *ends), copies)

    def _move(
        self, copies: Sequence[Copy], src: Mapping[int, Memory], dst: Mapping[int, Memory]
    ) -> Handle:
        for copy in copies:
            far, near = src[copy.source_pool].address, dst[copy.destination_pool].address
            rows = zip(
                copy.source.tolist(), copy.destination.tolist(), copy.length.tolist(), strict=True
            )
            for a, b, n in rows:
                ctypes.memmove(near + b, far + a, n)
        return Done()


class Local(Transport):
    """A transport inside one process."""

    name = "local"

    def __init__(self, around: Around = as_it_is) -> None:
        super().__init__()
        self.around = around
        self.links: list[LocalLink] = []

    def publish(self) -> bytes:
        return b""

    def _connect(self, metadata: bytes, memory: Mapping[int, Memory]) -> Link:
        del metadata
        link = LocalLink(self, memory)
        link.around = lambda act, copies: self.around(act, copies)
        self.links.append(link)
        return link


def small(name: str, tokens: int = 64, **given: Any) -> Plan:
    """A plan of a small model."""
    about: dict[str, Any] = {"memory": "2MiB", "max_len": tokens, "in_flight": 0}
    return plan(SMALL[name], **about | given)


class End:
    """All ranks of a plan as nodes of this process, with the request that they hold."""

    def __init__(
        self,
        made: Plan,
        tokens: int,
        *,
        seed: int = 0,
        listen: Sequence[str] | None = None,
        **given: Any,
    ) -> None:
        about: dict[str, Any] = {
            "piece": 4096, "buffers": 4, "name": f"end-{seed}", "identity": OURS
        }  # fmt: skip
        listen = listen or ["tcp://127.0.0.1:0"] * (made.tp * made.pp)
        self.plan = made
        self.tokens = tokens
        self.blocks = scattered(made, tokens)
        self.arounds: Around = as_it_is
        self.buffers = [Buffers(made, r, seed=seed) for r in range(made.tp * made.pp)]
        self.released: list[tuple[int, str, str]] = []
        self.nodes = [
            Node(
                made,
                rank=rank,
                memory=buffers.memory,
                transport=Local(lambda act, copies: self.arounds(act, copies)),
                listen=listen[rank],
                **about | given,
            )
            for rank, buffers in enumerate(self.buffers)
        ]

    @property
    def endpoints(self) -> list[str]:
        return [node.endpoint for node in self.nodes]

    def offer(self, request: str, **given: Any) -> None:
        for node in self.nodes:
            node.offer(request, self.blocks, self.tokens, released=self._note(node.rank), **given)

    def _note(self, rank: int) -> Callable[[str, str], None]:
        return lambda request, why: self.released.append((rank, request, why))

    def assert_idle(self, buffers: int = 4) -> None:
        """Nothing is leased and every staging buffer is back."""
        for node in self.nodes:
            assert len(node.leases) == 0
            assert node.staging.free == buffers

    def close(self) -> None:
        for node in self.nodes:
            node.server.stop()  # all at once, so that they need not wait for each other
        for node in self.nodes:
            node.close()
            assert node.transport.registered == 0


@contextmanager
def ends(*made: End) -> Iterator[tuple[End, ...]]:
    with ExitStack() as stack:
        for end in made:
            stack.callback(end.close)
        yield made


def expected(
    src: End, dst: End, rank: int, *, tokens: Any = None, layers: Any = None
) -> dict[int, Bytes]:
    """What the buffers of a destination rank hold after a transfer, guards and all."""
    way = route(src.plan, dst.plan)
    right = {index: whole.copy() for index, whole in dst.buffers[rank].before.items()}
    for source in way.sources(rank):
        copies = way.bind(
            source_rank=source, destination_rank=rank,
            source_blocks=src.blocks, destination_blocks=dst.blocks,
            tokens=dst.tokens if tokens is None else tokens, layers=layers,
        ).copies  # fmt: skip
        for copy in copies:
            there, first = src.buffers[source].pools[copy.source_pool], dst.buffers[rank].first
            for a, b, n in zip(copy.source, copy.destination, copy.length, strict=True):
                into = first[copy.destination_pool] + b
                right[copy.destination_pool][into : into + n] = there[a : a + n]
    return right


def assert_arrived(src: End, dst: End, rank: int, **about: Any) -> None:
    """Every byte that was asked for is there, nothing else has changed at either end."""
    right = expected(src, dst, rank, **about)
    for index, whole in dst.buffers[rank].whole.items():
        wrong = np.flatnonzero(whole != right[index])
        assert not wrong.size, f"rank {rank}, pool {index}: bytes {wrong[:8]} are wrong"
    for buffers in src.buffers:
        buffers.assert_untouched()


def fill_by_oracle(src: End, dst: End) -> Move:
    """Give the source the values that brute force knows; what is to move between the two."""
    rng = np.random.default_rng(5)
    whole = (0, src.tokens)
    move = Move(src.plan, dst.plan, src.blocks, dst.blocks, whole)
    for rank, memory in oracle.fill(move, rng).items():
        for index, pool in memory.pools.items():
            src.buffers[rank].pools[index][:] = pool
        src.buffers[rank].before = src.buffers[rank].copy()
    return move


def assert_by_oracle(move: Move, dst: End, rank: int) -> None:
    """Every element is where it belongs, found without any route."""
    buffers = dst.buffers[rank]
    now, before = buffers.pools, buffers.pools_of(buffers.before)
    poison = oracle.Memory(move.destination, rank, np.random.default_rng(6))
    for index, pool in poison.pools.items():
        pool[:] = before[index]
    right, arrived = oracle.expected(move, rank, poison)
    assert any(mask.any() for mask in arrived.values())
    for index in right.pools:
        assert np.array_equal(now[index], right.beside(index, now[index]))


def pull_all(src: End, dst: End, request: str, **about: Any) -> None:
    """Every destination rank pulls, and has the right bytes."""
    about = {"tokens": dst.tokens} | about
    for node in dst.nodes:
        with Session(node, src.endpoints) as session:
            transfer = session.pull(request, destination_blocks=dst.blocks, **about).wait(20)
            assert transfer.ready
            assert transfer.moved == transfer.total
        given = {key: about[key] for key in ("tokens", "layers") if key in about}
        assert_arrived(src, dst, node.rank, **given)


def until(true: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait until something is so; fail where it does not become so."""
    assert waited(true, seconds), "it did not become so in time"


def waited(true: Callable[[], bool], seconds: float) -> bool:
    """Whether something becomes so within some seconds."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True
