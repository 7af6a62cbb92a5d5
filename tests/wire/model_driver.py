"""Drives real nodes by the events of the protocol model, one event at a time.

The destination's transport holds every read until an event lets it land, fail or be severed, so
a stopped process is one whose read is held. It has no staging buffers: all reads go straight to
its blocks, in two pieces each.
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
from kvatlas.routing import Copy, Stream, route
from kvatlas.wire import Handle, Node, Session, Transfer, protocol
from kvatlas.wire.channels import Channels
from kvatlas.wire.client.expected import Announcement, Expected
from kvatlas.wire.transports.errors import peer_lost
from tests.wire import protocol_model as model
from tests.wire.faulty import Act
from tests.wire.helpers import End, small, until, waited

TOKENS = 32
BLOCK = {0: 10, 1: 11, 2: 12}
"""The destination's block for each block of the model."""
SOURCE_BLOCKS = {"a": [0, 1], "b": [2, 3]}
PUSHED_BLOCKS = [0, 1]
_SECONDS = 600.0
_MOMENT = 0.05
"""Seconds in which a node without a rule does what it must not do."""


class HeldRead(Handle):
    """A posted read that waits for the driver: its bytes land, it fails, or its link is severed."""

    def __init__(self, act: Act) -> None:
        self._act = act
        self.over = self._lost = False
        self.given_up = threading.Event()
        """Set once the node no longer waits for it."""

    def land(self) -> None:
        """Write the bytes, however late."""
        self._act()
        self.over = True

    def sever(self) -> None:
        """The link is gone: no bytes will be written."""
        self.over = True

    def fail(self) -> None:
        """The process that is read from has died."""
        self.over = self._lost = True

    def _poll(self) -> bool:
        if self._lost:
            raise AtlasError(Code.PEER_LOST, got="a killed process", hint="Start it again")
        return self.over

    def _release(self) -> None:
        self.given_up.set()

    def _settle(self) -> bool:
        return self.over


@dataclass
class Push:
    """One announcement of a pusher, and the read from it that is held."""

    offer: str
    rank: int
    announcement: Announcement
    read: HeldRead | None = None
    landed: int = 0

    @property
    def live(self) -> bool:
        return not self.announcement.transfer.done


@dataclass
class PushProcess:
    """A pusher's node, and what it has announced."""

    node: Node
    end: End
    session: bytes
    pushes: list[Push] = field(default_factory=list)


def piece_bytes(stream: Stream) -> int:
    """Return the bytes of a direct piece: a stream has as many pieces as in the model."""
    return stream.nbytes // model.PIECES


class Nodes:
    """The nodes of the model's world. They serve many runs, one after the other."""

    def __init__(self) -> None:
        self._closing = ExitStack()
        self.target = self._end(small("dense", layout="BLHNC"), seed=2, buffers=0)
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
            process.pushes = []
        self.forgetting: Future[str] | None = None
        self.offers = count()
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
        live = [push for push in self._pushes() if push.live]
        forget = self.node.forget
        self.forgetting = self.nodes.threads.submit(
            outcome_of, lambda: forget(self._name("request"))
        )
        for push in live:
            self._await_end(push)
        self._settled()
        return model.OK

    def _settled(self) -> None:
        """Wait for what the node does once no read that was given up can land."""
        held = [push for push in self._pushes() if push.read is not None]
        if self.forgetting is not None and not held:
            assert self.forgetting.result(20) == model.OK
            self.forgetting = None
        waiting = [p for p in self._pushes() if p.live and p.read is None and p.landed == 0]
        late = {push.rank for push in held if not push.live}
        for push in waiting:
            if push.rank not in late:
                self._await_post(push)
        if any(push.rank in late for push in waiting):
            early = waited(lambda: self._unclaimed() is not None, _MOMENT)
            assert not early, "the node reads while an older read may land"
        if self.forgetting is not None:
            early = waited(self.forgetting.done, _MOMENT)
            assert not early, "the blocks are free while a read may land"

    def _pushes(self) -> list[Push]:
        return [push for process in self.nodes.pushers.values() for push in process.pushes]

    def _await_end(self, push: Push) -> None:
        """Wait until the node has given up a push, and its read if it has one."""
        until(lambda: not push.live, 20)
        if push.read is not None:
            assert push.read.given_up.wait(20)

    def _await_post(self, push: Push) -> None:
        """Wait until the node reads from a push, or has given it up."""
        until(lambda: self._unclaimed() is not None or not push.live, 20)
        push.read = self._unclaimed()

    def _unclaimed(self) -> HeldRead | None:
        """The posted read that belongs to no push and no pull yet."""
        known = {id(one) for one in (*self.reads.values(), *(p.read for p in self._pushes()))}
        new = [read for read in self.posted if id(read) not in known and not read.over]
        return new[0] if new else None

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
        """Reads from the process fail; a push that waits for its turn ends as well."""
        pushes = self.nodes.pushers[who].pushes
        for push in pushes:
            if push.live and push.read is None:
                push.announcement.transfer.failed(push.rank, peer_lost("a killed process"))
        for push in pushes:
            if push.read is not None:
                push.read.fail()
                push.read = None
        for push in pushes:
            assert push.announcement.transfer.wait_released(20)
        self.nodes.pushers[who].pushes.clear()
        self._settled()
        return model.OK

    def _announce(self, who: str) -> str:
        return outcome_of(lambda: self._try_to_announce(self.nodes.pushers[who]))

    def _try_to_announce(self, process: PushProcess) -> None:
        node, rank = process.node, process.node.rank
        offer = f"{self._name('push')} {next(self.offers)}"
        node.offer(offer, PUSHED_BLOCKS, TOKENS, timeout=_SECONDS)
        question = protocol.Announce(
            session=process.session,
            request=self._name("request"),
            offer=offer,
            endpoint=node.endpoint,
            start=0,
            stop=TOKENS,
            seconds=_SECONDS,
            how="direct",
        )
        older = [push for push in self._pushes() if push.rank == rank and push.live]
        try:
            ask(node.channels, self.target, question)
        except AtlasError:
            node.withdraw(offer)
            raise
        assert self.expected is not None
        current = self.expected.current
        until(lambda: any(one.question.offer == offer for one in current[rank]), 20)
        process.pushes.append(Push(offer, rank, current[rank][-1]))
        for push in older:
            self._await_end(push)
        self._settled()

    def _expire(self, who: str) -> str:
        process = self.nodes.pushers[who]
        live = [push for push in process.pushes if push.live and push.offer in process.node.offers]
        process.node.withdraw(live[0].offer)
        return model.OK

    def _land_push(self, who: str) -> str:
        process = self.nodes.pushers[who]
        push = next(one for one in process.pushes if one.read is not None)
        read, live = push.read, push.live
        assert read is not None
        blocks = PUSHED_BLOCKS, real_blocks("request")
        self._must_hold(process.end, push.rank, blocks, push.landed)
        read.land()
        push.read = None
        if not live:
            until(lambda: push.announcement.transfer.released, 20)
            self._settled()
            return model.OK
        push.landed += 1
        if push.landed < model.PIECES:
            self._await_post(push)
        return model.OK

    def _sever_push(self, who: str) -> str:
        pushes = self.nodes.pushers[who].pushes
        push = next(one for one in pushes if one.read is not None and not one.live)
        assert push.read is not None
        push.read.sever()
        push.read = None
        until(lambda: push.announcement.transfer.released, 20)
        self._settled()
        return model.OK

    def _confirm_push(self, who: str) -> str:
        pushes = self.nodes.pushers[who].pushes
        push = next(one for one in pushes if one.landed == model.PIECES)
        pushes.remove(push)
        return outcome_of(lambda: push.announcement.transfer.wait(20))

    # -- pulls ------------------------------------------------------------------------------

    def _pull(self, who: str) -> str:
        return outcome_of(lambda: self._try_to_pull(who))

    def _try_to_pull(self, who: str) -> None:
        before = len(self.posted)
        self.transfers.pop(who, None)
        self.landed[who] = 0
        transfer = self.transfers[who] = self.nodes.pulling.pull(
            self._name(who),
            destination_blocks=real_blocks(who),
            tokens=TOKENS,
            how="direct",
            timeout=_SECONDS,
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
        if who in self.nodes.pushers:
            return self._land_push(who)
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
        if who in self.nodes.pushers:
            return self._confirm_push(who)
        transfer = self.transfers[who]
        outcome = outcome_of(lambda: transfer.wait(20))
        assert transfer.wait_released(20)
        if outcome == model.OK and self._name(who) not in self.source.nodes[0].offers:
            self._offer_one(who)  # the source ends an offer that was read
        return outcome

    def pulled(self, who: str, piece: int) -> None:
        """Note that a piece of a pull must be in the blocks now."""
        self._must_hold(self.source, 0, (SOURCE_BLOCKS[who], real_blocks(who)), piece)

    def _cancel(self, who: str) -> str:
        self.transfers[who].cancel()
        assert self.reads[who].given_up.wait(20)
        return model.OK

    def _sever(self, who: str) -> str:
        if who in self.nodes.pushers:
            return self._sever_push(who)
        self.reads.pop(who).sever()
        assert self.transfers[who].wait_released(20)
        return model.OK

    # -- offers -----------------------------------------------------------------------------

    def _offer(self, who: str) -> str:
        if who == "source":
            self._offer_all()
            return model.OK
        blocks = real_blocks("own")
        return outcome_of(lambda: self.node.offer(self._name("own"), blocks, 16, timeout=_SECONDS))

    def _offer_all(self) -> None:
        for who in SOURCE_BLOCKS:
            self._offer_one(who)

    def _offer_one(self, who: str) -> None:
        offer = self.source.nodes[0].offer
        offer(self._name(who), SOURCE_BLOCKS[who], TOKENS, timeout=_SECONDS)

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
        self, src: End, rank: int, blocks: tuple[list[int], list[int]], piece: int
    ) -> None:
        """Copy a piece of a stream to the bytes that the destination must have."""
        stream = route(src.plan, self.target.plan).stream(
            source_rank=rank,
            destination_rank=0,
            source_blocks=blocks[0],
            destination_blocks=blocks[1],
            tokens=TOKENS,
        )
        right = self.target.buffers[0].pools_of(self.right)
        size = stream.nbytes // model.PIECES
        for copy in stream.copies(piece * size, (piece + 1) * size):
            there = src.buffers[rank].pools[copy.source_pool]
            for a, b, n in zip(copy.source, copy.destination, copy.length, strict=True):
                right[copy.destination_pool][b : b + n] = there[a : a + n]

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
        for process in self.nodes.pushers.values():
            for offer in list(process.node.offers):
                process.node.withdraw(offer)
        until(lambda: not self.node.leases, 20)
        assert self.node.ledger.uses() == {}

    def interrupt(self) -> None:
        """Forget the request, cancel the pulls, and end the reads that are held."""
        self.ending = True
        for read in self.posted:
            read.sever()
        if self.forgetting is not None:
            self.forgetting.result(20)
        self.node.forget(self._name("request"))
        for transfer in self.transfers.values():
            transfer.cancel()
        for read in self.posted:
            read.sever()


def real_blocks(owner: str) -> list[int]:
    """Return the destination's blocks of an owner in the model."""
    return [BLOCK[block] for block in model.BLOCKS_OF[owner]]
