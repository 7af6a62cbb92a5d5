"""Drives real nodes by the events of the protocol model, one event at a time.

The destination's transport holds every read until an event lets it land, fail or be severed, so
a stopped process is one whose read is held. Pushers send their messages one by one.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from kvatlas import AtlasError
from kvatlas.errors import Code
from kvatlas.routing import Copy, route
from kvatlas.wire import Handle, Node, Session, Transfer, protocol
from kvatlas.wire.channels import Channels
from kvatlas.wire.leases import Expected
from tests.wire import protocol_model as model
from tests.wire.faulty import Act
from tests.wire.helpers import End, small, until

TOKENS = 32
BATCH = 8192
"""Bytes that a pull reads at once: half of it, so that it has as many pieces as in the model."""
BLOCK = {0: 10, 1: 11, 2: 12}
"""The destination's block for each block of the model."""
SOURCE_BLOCKS = {"a": [0, 1], "b": [2, 3]}
PUSHED_BLOCKS = [0, 1]
BUFFERS = 32
"""Staging buffers of the destination: more than held reads and open leases can use."""
_SECONDS = 600.0


class HeldRead(Handle):
    """A posted read that waits for the driver: its bytes land, it fails, or its link is severed."""

    def __init__(self, act: Act) -> None:
        self._act = act
        self._over = self._lost = False
        self.given_up = threading.Event()
        """Set once the node no longer waits for it."""

    def land(self) -> None:
        """Write the bytes, however late."""
        self._act()
        self._over = True

    def sever(self) -> None:
        """The link is gone: no bytes will be written."""
        self._over = True

    def fail(self) -> None:
        """The process that is read from has died."""
        self._over = self._lost = True

    def _poll(self) -> bool:
        if self._lost:
            raise AtlasError(Code.PEER_LOST, got="a killed process", hint="Start it again")
        return self._over

    def _release(self) -> None:
        self.given_up.set()

    def _settle(self) -> bool:
        return self._over


@dataclass
class PushProcess:
    """A pusher's node, and what it has sent."""

    node: Node
    end: End
    session: bytes
    lease: bytes = b""
    fetched: int = 0
    fetching: list[tuple[HeldRead, Future[str]]] = field(default_factory=list)


class Nodes:
    """The nodes of the model's world. They serve many runs, one after the other."""

    def __init__(self) -> None:
        self._closing = ExitStack()
        self.target = self._end(small("dense", layout="BLHNC"), seed=2, buffers=BUFFERS)
        self.source = self._end(small("dense"), seed=5)
        first = self._end(small("dense", tp=2), seed=1, name="pusher")
        second = self._end(first.plan, seed=3, name="pusher")
        stranger = self._end(first.plan, seed=4, name="stranger")
        self.threads = self._closing.enter_context(ThreadPoolExecutor(32))
        self.pulling = self._closing.enter_context(
            Session(self.target.nodes[0], self.source.endpoints)
        )
        self.numbers = count()
        self.pushers = {
            "old": self._process(first, 0),
            "new": self._process(second, 0),
            "one": self._process(first, 1),
            "stranger": self._process(stranger, 0),
        }

    def _end(self, made: Any, **about: Any) -> End:
        end = End(made, TOKENS, **about)
        self._closing.callback(end.close)
        return end

    def _process(self, end: End, rank: int) -> PushProcess:
        node = end.nodes[rank]
        welcome = ask(node.channels, self.target, node.hello(with_plan=True))
        return PushProcess(node, end, welcome.session)

    def close(self) -> None:
        self._closing.close()


def ask(channels: Channels, to: End, message: protocol.Message) -> Any:
    """Send a message to the first node of an end, and return the answer."""
    return channels.ask(to.endpoints[0], message, deadline=time.monotonic() + 20)


def outcome_of(act: Callable[[], Any]) -> str:
    """Return the code of the error that an operation raises, or `ok`."""
    try:
        act()
    except AtlasError as refused:
        return str(refused.code)
    return model.OK


class Driver:
    """One run: the real nodes, and the bytes that the destination must have."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes, self.target, self.source = nodes, nodes.target, nodes.source
        self.node = nodes.target.nodes[0]
        self.number = next(nodes.numbers)
        self.random = np.random.default_rng(self.number)
        self.posted: list[HeldRead] = []
        self.ending = False
        self.expected: Expected | None = None
        self.transfers: dict[str, Transfer] = {}
        self.reads: dict[str, HeldRead] = {}
        self.landed: dict[str, int] = {}
        for process in nodes.pushers.values():
            process.lease, process.fetched, process.fetching = b"", 0, []
        self.right = self.target.buffers[0].copy()
        self.target.arounds = self._hold
        self._offer_all()

    def _hold(self, act: Act, copies: Sequence[Copy]) -> Handle:
        del copies
        read = HeldRead(act)
        self.posted.append(read)
        if self.ending:
            read.sever()
        return read

    def _name(self, what: str) -> str:
        return f"{what} {self.number}"

    def step(self, event: model.Event) -> str:
        """Carry out an event; return its outcome."""
        act: Callable[..., str] = getattr(self, f"_{event.action}")
        return act(event.who) if event.who else act()

    # -- the node ---------------------------------------------------------------------------

    def _expect(self) -> str:
        return outcome_of(self._try_to_expect)

    def _try_to_expect(self) -> None:
        plan = self.nodes.pushers["old"].end.plan
        blocks = real_blocks("request")
        self.expected = self.node.expect(
            self._name("request"), blocks, TOKENS, source=plan, pushers=["pusher"]
        )

    def _forget(self) -> str:
        self.expected = None
        return outcome_of(lambda: self.node.forget(self._name("request")))

    def use(self, free: set[int]) -> None:
        """Let the engine write to free blocks."""
        size = self.node.plan.pools[0].block_bytes
        for block in free:
            at = BLOCK[block] * size
            content = self.random.integers(0, 256, size, dtype=np.uint8)
            self.target.buffers[0].pools[0][at : at + size] = content
            self.target.buffers[0].pools_of(self.right)[0][at : at + size] = content

    # -- pushers ----------------------------------------------------------------------------

    def _start(self, who: str) -> str:
        del who
        return model.OK

    _stop = _continue = _start  # the model no longer offers, or offers again, its events

    def _kill(self, who: str) -> str:
        process = self.nodes.pushers[who]
        for read, answer in process.fetching:
            read.fail()
            answer.result(20)
        process.fetching.clear()
        return model.OK

    def _open(self, who: str) -> str:
        return outcome_of(lambda: self._try_to_open(self.nodes.pushers[who]))

    def _try_to_open(self, process: PushProcess) -> None:
        question = protocol.Open(
            session=process.session,
            direction="push",
            request=self._name("request"),
            blocks=protocol.pack_tables({0: PUSHED_BLOCKS}),
            start=0,
            stop=TOKENS,
            seconds=_SECONDS,
        )
        process.lease = ask(process.node.channels, self.target, question).lease
        process.fetched = 0
        self._ask_of_lease(process, protocol.Borrow, buffers=1, seconds=5.0)

    def _ask_of_lease(self, process: PushProcess, kind: Any, **about: Any) -> Any:
        question = kind(session=process.session, lease=process.lease, **about)
        return ask(process.node.channels, self.target, question)

    def _fetch(self, who: str) -> str:
        process, before = self.nodes.pushers[who], len(self.posted)
        span = self._span(process.fetched)
        about: dict[str, Any] = {"start": span[0], "stop": span[1], "lease": process.lease}
        question = protocol.Fetch(session=process.session, **about)
        channels = process.node.channels
        answer = self.nodes.threads.submit(outcome_of, lambda: ask(channels, self.target, question))
        until(lambda: len(self.posted) > before or answer.done(), 20)
        if len(self.posted) == before:
            return answer.result()
        process.fetching.append((self.posted[-1], answer))
        return model.OK

    def _span(self, piece: int) -> tuple[int, int]:
        return piece * self.node.piece, (piece + 1) * self.node.piece

    def _read(self, who: str) -> str:
        process = self.nodes.pushers[who]
        read, answer = process.fetching.pop(0)
        read.land()
        return answer.result(20)

    def pushed(self, who: str, piece: int) -> None:
        """Note that a piece of a pusher must be in the blocks now."""
        process = self.nodes.pushers[who]
        if process.fetched == piece:  # else an older lease of the process has delivered
            process.fetched += 1
        rank = process.node.rank
        blocks = PUSHED_BLOCKS, real_blocks("request")
        self._must_hold(process.end, rank, blocks, self._span(piece))

    def _close(self, who: str) -> str:
        process = self.nodes.pushers[who]
        return outcome_of(lambda: self._ask_of_lease(process, protocol.Close, complete=True))

    def _expire(self, who: str) -> str:
        process = self.nodes.pushers[who]
        self.node.leases.find(process.lease, process.session).expires = 0.0
        self.node.sweep()
        return model.OK

    # -- pulls ------------------------------------------------------------------------------

    def _pull(self, who: str) -> str:
        return outcome_of(lambda: self._try_to_pull(who))

    def _try_to_pull(self, who: str) -> None:
        before = len(self.posted)
        self.transfers.pop(who, None)
        self.landed[who] = 0
        transfer = self.transfers[who] = self.nodes.pulling.pull(
            self._name(who),
            dst_blocks=real_blocks(who),
            tokens=TOKENS,
            how="direct",
            seconds=_SECONDS,
        )
        self._await_read(who, before)
        if transfer.done:
            assert transfer.wait_released(20)
            transfer.wait(0.0)

    def _await_read(self, who: str, before: int) -> None:
        transfer = self.transfers[who]
        until(lambda: len(self.posted) > before or transfer.done, 20)
        if len(self.posted) > before:
            self.reads[who] = self.posted[-1]

    def _land(self, who: str) -> str:
        transfer, before = self.transfers[who], len(self.posted)
        failed = transfer.done
        self.reads.pop(who).land()
        self.landed[who] += 1
        if failed:
            assert transfer.wait_released(20)
        elif self.landed[who] < model.PIECES:
            self._await_read(who, before)
        return model.OK

    def _confirm(self, who: str) -> str:
        transfer = self.transfers[who]
        outcome = outcome_of(lambda: transfer.wait(20))
        assert transfer.wait_released(20)
        if outcome == model.OK and self._name(who) not in self.source.nodes[0].offers:
            self._offer_one(who)  # the source ends an offer that was read
        return outcome

    def pulled(self, who: str, piece: int) -> None:
        """Note that a piece of a pull must be in the blocks now."""
        span = piece * BATCH, (piece + 1) * BATCH
        self._must_hold(self.source, 0, (SOURCE_BLOCKS[who], real_blocks(who)), span)

    def _cancel(self, who: str) -> str:
        self.transfers[who].cancel()
        assert self.reads[who].given_up.wait(20)
        return model.OK

    def _sever(self, who: str) -> str:
        self.reads.pop(who).sever()
        assert self.transfers[who].wait_released(20)
        return model.OK

    # -- offers -----------------------------------------------------------------------------

    def _offer(self, who: str) -> str:
        if who == "source":
            self._offer_all()
            return model.OK
        blocks = real_blocks("own")
        return outcome_of(lambda: self.node.offer(self._name("own"), blocks, 16, seconds=_SECONDS))

    def _offer_all(self) -> None:
        for who in SOURCE_BLOCKS:
            self._offer_one(who)

    def _offer_one(self, who: str) -> None:
        offer = self.source.nodes[0].offer
        offer(self._name(who), SOURCE_BLOCKS[who], TOKENS, seconds=_SECONDS)

    def _withdraw(self, who: str) -> str:
        if who == "own":
            return outcome_of(lambda: self.node.withdraw(self._name("own")))
        for name in SOURCE_BLOCKS:
            self.source.nodes[0].withdraw(self._name(name))
        return model.OK

    def _rewrite(self, who: str) -> str:
        del who
        pool = self.source.buffers[0].pools[0]
        pool[:] = self.random.integers(0, 256, pool.size, dtype=np.uint8)
        return model.OK

    # -- what must be so ----------------------------------------------------------------------

    def _must_hold(
        self, src: End, rank: int, blocks: tuple[list[int], list[int]], span: tuple[int, int]
    ) -> None:
        """Copy bytes of a stream to the bytes that the destination must have."""
        stream = route(src.plan, self.target.plan).stream(
            src_rank=rank, dst_rank=0, src_blocks=blocks[0], dst_blocks=blocks[1], tokens=TOKENS
        )
        right = self.target.buffers[0].pools_of(self.right)
        for copy in stream.copies(*span):
            there = src.buffers[rank].pools[copy.src_pool]
            for a, b, n in zip(copy.src, copy.dst, copy.length, strict=True):
                right[copy.dst_pool][b : b + n] = there[a : a + n]

    def check(self, state: model.State) -> None:
        """Compare the nodes with a state of the model: claims, outcomes, and every byte."""
        uses = Counter(use for use, _ in state.claims)
        assert self.node.ledger.uses() == uses
        if state.expecting:
            assert self.expected is not None
            assert self.expected.ready.is_set() is state.ready
        for name, pull in zip(SOURCE_BLOCKS, state.pulls, strict=False):
            ready = name in self.transfers and self.transfers[name].ready
            assert ready is (pull.status == "ready"), name
        for index, whole in self.target.buffers[0].whole.items():
            wrong = np.flatnonzero(whole != self.right[index])
            assert not wrong.size, f"bytes {wrong[:4]} of pool {index} are wrong"

    def end(self) -> None:
        """End everything that is in progress, so that the nodes serve the next run."""
        self.interrupt()
        for transfer in self.transfers.values():
            assert transfer.wait_released(20)
        for node, names in ((self.node, ["own"]), (self.source.nodes[0], list(SOURCE_BLOCKS))):
            for name in names:
                node.withdraw(self._name(name))
        until(lambda: self.node.staging.free == BUFFERS and not self.node.leases, 20)
        assert self.node.ledger.uses() == {}

    def interrupt(self) -> None:
        """Forget the request, cancel the pulls, and end the reads that are held."""
        self.ending = True
        self.node.forget(self._name("request"))
        for transfer in self.transfers.values():
            transfer.cancel()
        for who in self.nodes.pushers:
            self._kill(who)
        for read in self.posted:
            read.sever()


def real_blocks(owner: str) -> list[int]:
    """Return the destination's blocks of an owner in the model."""
    return [BLOCK[block] for block in model.BLOCKS_OF[owner]]
