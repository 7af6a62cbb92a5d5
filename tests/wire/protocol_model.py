"""An explicit-state model of block ownership on the wire, searched exhaustively.

The model has one destination node with three blocks. Processes push a request into two of them,
one process per source rank; pulls `a` and `b` of the node read from one source; the node offers a
block of its own; its engine uses blocks that have no claim. `Model.step` defines what each event
does and which error it gets. Bytes are tags: which announcement or which pull wrote a piece.

A push is a pull that its source announces. The node reads the part of each rank from the process
that announced it last. Its reads go straight to the blocks, and may land after they were given up.
So do those of a direct pull. A staged pull reads each piece into the node's buffer, and a worker
then puts it in place; coalesced pulls do the same.

Who causes which event:

| event | caused by | effect |
|---|---|---|
| `expect`, `forget` | the node | claim blocks for a push; end its reads, then free the blocks |
| `announce` | a pusher | have the node read a part, in place of an older announcement of the rank |
| `expire` | time | a pusher's offer ends |
| `start`, `stop`, `continue`, `kill` | an operator | a replacement, SIGSTOP, SIGCONT, SIGKILL |
| `pull`, `cancel` | the node | claim and fill blocks; give up |
| `confirm` | the node | have the source confirm that it held its blocks |
| `land`, `sever` | the transport | a posted read writes its piece, also late; it never will |
| `place`, `placed` | a worker | begin to copy the buffer into the blocks; the copy is done |
| `offer`, `withdraw`, `rewrite` | a source, the node | let blocks be read; end that; reuse them |
| `use` | the engine | write to every block that has no claim |

A process is delayed by taking none of its events. A repeated announcement is answered with the
state of the first, so it adds no state; a second push is one more attempt.

`Rules` are the rules of ownership. Removing one makes `search` find the shortest way to break an
invariant; `Model.violations` lists the invariants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeVar

T = TypeVar("T")

RANKS, PIECES, BLOCKS = 2, 2, 3
BLOCKS_OF = {"request": (0, 1), "a": (0, 1), "b": (1, 2), "own": (2,)}
"""The blocks of the pushed request, of the two pulls, and of the node's own offer."""

OK, IN_USE, UNKNOWN, EXPIRED = "ok", "blocks_in_use", "unknown_request", "lease_expired"
"""Outcomes of an event: success, or the code of the error."""

Key = tuple[int, int]
"""An announcement: the pusher's index and its attempt."""


@dataclass(frozen=True)
class Rules:
    """The rules of ownership. Each can be removed."""

    fence: bool = True
    """An announcement of a rank ends the reads of older ones; only the newest is confirmed."""
    settle: bool = True
    """A replacement reads, and `forget` frees the blocks, once no older read can write to them."""
    arrival_is_final: bool = True
    """A rank that has arrived is not read again."""
    named_pushers: bool = True
    """Only processes that `expect` names may push."""
    claims: bool = True
    """Blocks are filled by one operation, or read by any number."""
    quarantine: bool = True
    """A failed pull keeps its blocks until its posted read cannot write to them."""
    confirm: bool = True
    """A pull is ready only if the source has held the blocks until the last byte was read."""
    buffers: bool = True
    """A failed pull keeps its buffer until its posted read cannot write to it."""
    busy: bool = True
    """A failed pull keeps its blocks while a worker puts a piece in place."""


class Pusher(NamedTuple):
    """A process that may push the part of one rank."""

    name: str
    rank: int
    replaces: str = ""
    """The process in whose place it is started; empty if it runs from the beginning."""
    named: bool = True


OLD, NEW, ONE = Pusher("old", 0), Pusher("new", 0, replaces="old"), Pusher("one", 1)
NEW_ONE = Pusher("new one", 1, replaces="one")
STRANGER = Pusher("stranger", 0, named=False)


@dataclass(frozen=True)
class World:
    """The processes that take part, and the bounds that keep the number of states finite."""

    pushers: tuple[Pusher, ...] = ()
    pulls: tuple[str, ...] = ()
    staged: bool = False
    """Whether the pulls read through the node's buffer."""
    offers: bool = False
    """Whether the node offers a block of its own."""
    attempts: int = 1
    """Announcements of one pusher, and times that one pull is started."""
    expectations: int = 1
    rewrites: int = 1
    """Times that the source of the pulls reuses its blocks."""
    engine: bool = True
    """Whether the engine uses free blocks, once."""
    faults: frozenset[str] = frozenset()
    """Faults and whom they hit: `stop old`, `kill one`, `expire old`."""


class Event(NamedTuple):
    """One step: an action, and the process, pull or offer that it concerns."""

    action: str
    who: str = ""

    def __str__(self) -> str:
        return f"{self.action} {self.who}".strip()


class Part(NamedTuple):
    """The node's pull of the part that a pusher has announced."""

    pusher: int
    attempt: int
    landed: int = 0
    posted: bool = False
    """Whether a read is posted. It may land even after the pull has ended."""
    live: bool = True
    offered: bool = True
    """Whether the pusher still offers its blocks."""

    @property
    def key(self) -> Key:
        return self.pusher, self.attempt


class Pull(NamedTuple):
    """A pull of the node.

    While it runs, a read is posted, a piece is in the buffer, or all pieces are in the blocks.
    """

    status: str = "none"
    landed: int = 0
    posted: bool = False
    leased: bool = False
    """Whether the source still holds the lease."""
    version: int = 0
    """The content of the source's blocks when the lease was opened."""
    tries: int = 0
    placing: str = ""
    """The content that a worker copies from the buffer into the blocks; empty if none does."""


class State(NamedTuple):
    """Everything that the invariants and the next events depend on."""

    cells: tuple[str, ...]
    """The tag in every (block, rank, piece)."""
    promised: tuple[str, ...]
    """The tag that the node's engine relies on in each cell; empty where it relies on none."""
    processes: tuple[str, ...]
    """Per pusher: `absent`, `running`, `stopped` or `dead`."""
    attempts: tuple[int, ...]
    told: tuple[bool, ...]
    """Per pusher: whether this expectation's push was confirmed to it."""
    pulls: tuple[Pull, ...]
    claims: frozenset[tuple[str, str]] = frozenset()
    """Pairs of a use and an owner, as in the node's ledger."""
    expectation: int = 0
    """The number of the newest expectation."""
    expecting: bool = False
    forgetting: bool = False
    """Whether a request was forgotten, and its blocks are not yet free."""
    ready: bool = False
    current: tuple[Key | None, ...] = (None,) * RANKS
    arrived: tuple[Key | None, ...] = (None,) * RANKS
    parts: tuple[Part, ...] = ()
    source: str = "running"
    offered: bool = True
    version: int = 0
    buffer: str = ""
    """The tag in the node's buffer."""
    buffer_of: str = ""
    """The pull that has the buffer; empty if it is free."""
    used: bool = False
    late_write: str = ""
    """The owner that wrote after its right had ended; empty if none has."""


Step = tuple[State, str]


def cells_of(owner: str, rank: int | None, piece: int) -> list[int]:
    """Return the indices of the cells that one piece of a request or a pull fills."""
    ranks = range(RANKS) if rank is None else (rank,)
    return [(block * RANKS + r) * PIECES + piece for block in BLOCKS_OF[owner] for r in ranks]


def all_cells_of(blocks: Iterable[int]) -> list[int]:
    """Return the indices of all cells of some blocks."""
    each = RANKS * PIECES
    return [block * each + cell for block in blocks for cell in range(each)]


def written(cells: tuple[str, ...], at: Iterable[int], tag: str) -> tuple[str, ...]:
    """Return the cells with a tag in some of them."""
    changed = list(cells)
    for cell in at:
        changed[cell] = tag
    return tuple(changed)


def replaced(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    """Return a tuple with one value replaced."""
    return (*values[:index], value, *values[index + 1 :])


@dataclass(frozen=True)
class Model:
    """A world under some rules: its first state, its events and its invariants."""

    world: World
    rules: Rules = field(default_factory=Rules)

    @cached_property
    def index(self) -> dict[str, int]:
        """The index of every pusher and pull by name."""
        pushers = {one.name: at for at, one in enumerate(self.world.pushers)}
        return pushers | {name: at for at, name in enumerate(self.world.pulls)}

    @property
    def first(self) -> State:
        """The state in which nothing has happened."""
        count = len(self.world.pushers)
        return State(
            cells=("before",) * (BLOCKS * RANKS * PIECES),
            promised=("",) * (BLOCKS * RANKS * PIECES),
            processes=tuple("absent" if p.replaces else "running" for p in self.world.pushers),
            attempts=(0,) * count,
            told=(False,) * count,
            pulls=(Pull(),) * len(self.world.pulls),
        )

    def step(self, state: State, event: Event) -> Step:
        """Return the state after a possible event, and the event's outcome."""
        act: Callable[..., Step] = getattr(self, f"_{event.action}")
        return act(state, event.who) if event.who else act(state)

    def possible(self, state: State) -> Iterator[Event]:
        """Yield the events that can happen in a state, those that are refused included."""
        world = self.world
        yield from self._node_events(state)
        for at, pusher in enumerate(world.pushers):
            for action in self._pusher_actions(state, at):
                yield Event(action, pusher.name)
        for name, pull in zip(world.pulls, state.pulls, strict=True):
            for action in self._pull_actions(state, pull):
                yield Event(action, name)
        if world.pulls:
            yield from self._source_events(state)

    def _node_events(self, state: State) -> Iterator[Event]:
        world = self.world
        if world.pushers and not state.expecting and state.expectation < world.expectations:
            yield Event("expect")
        if state.expecting and not state.forgetting:
            yield Event("forget")
        if world.offers:
            yield Event("withdraw" if ("offered", "own") in state.claims else "offer", "own")
        if world.engine and not state.used:
            yield Event("use")

    def _pusher_actions(self, state: State, at: int) -> Iterator[str]:
        world, pusher = self.world, self.world.pushers[at]
        status = state.processes[at]
        if status == "absent":
            if state.processes[self.index[pusher.replaces]] in ("stopped", "dead"):
                yield "start"
            return
        if status == "running":
            yield from ("stop",) if f"stop {pusher.name}" in world.faults else ()
            if state.attempts[at] < world.attempts:
                yield "announce"
        if status == "stopped":
            yield "continue"
        if status != "dead" and f"kill {pusher.name}" in world.faults:
            yield "kill"
        yield from self._part_actions(state, at)

    def _part_actions(self, state: State, at: int) -> Iterator[str]:
        name, running = self.world.pushers[at].name, state.processes[at] == "running"
        own = [part for part in state.parts if part.pusher == at]
        if f"expire {name}" in self.world.faults and any(one.live and one.offered for one in own):
            yield "expire"
        if any(one.posted for one in own) and running:
            yield "land"
        if any(one.posted and not one.live for one in own):
            yield "sever"
        if any(one.live and one.landed == PIECES for one in own) and running:
            yield "confirm"

    def _pull_actions(self, state: State, pull: Pull) -> Iterator[str]:
        running, complete = pull.status == "running", pull.landed == PIECES
        over = not running and not pull.posted and not pull.placing
        waits = self.world.staged and state.buffer_of != ""
        if over and not waits and pull.tries < self.world.attempts and state.source == "running":
            yield "pull"
        if running:
            yield "cancel"
        if pull.posted and state.source == "running":
            yield "land"
        if pull.posted and not running:
            yield "sever"
        if pull.placing:
            yield "placed"
        elif running and self.world.staged and not pull.posted and not complete:
            yield "place"
        if running and complete:
            yield "confirm"

    def _source_events(self, state: State) -> Iterator[Event]:
        if "stop source" in self.world.faults:
            yield Event("stop" if state.source == "running" else "continue", "source")
        if state.source == "running":
            yield Event("withdraw" if state.offered else "offer", "source")
            if not state.offered and state.version < self.world.rewrites:
                yield Event("rewrite", "source")

    # -- the node ---------------------------------------------------------------------------

    def _expect(self, state: State) -> Step:
        claimed = self._claimed(state, "expected", "request")
        if claimed is None:
            return state, IN_USE
        none = (None,) * RANKS
        number = state.expectation + 1
        told = (False,) * len(state.told)
        return claimed._replace(
            expectation=number, expecting=True, ready=False, current=none, arrived=none, told=told
        ), OK

    def _forget(self, state: State) -> Step:
        state = self._ended(state, state.parts)
        return self._settled(state._replace(expecting=False, ready=False, forgetting=True)), OK

    def _use(self, state: State) -> Step:
        owned = {block for _, owner in state.claims for block in BLOCKS_OF[owner]}
        free = all_cells_of(set(range(BLOCKS)) - owned)
        cells, promised = (written(now, free, "engine") for now in (state.cells, state.promised))
        return state._replace(cells=cells, promised=promised, used=True), OK

    # -- pushers ----------------------------------------------------------------------------

    def _start(self, state: State, who: str) -> Step:
        return self._now(state, who, "running"), OK

    def _stop(self, state: State, who: str) -> Step:
        return self._now(state, who, "stopped"), OK

    def _continue(self, state: State, who: str) -> Step:
        return self._now(state, who, "running"), OK

    def _kill(self, state: State, who: str) -> Step:
        """Kill a process. Reads from its memory fail, and its part can no longer arrive."""
        at = self.index[who]
        state = self._ended(state, [part for part in state.parts if part.pusher == at])
        parts = tuple(p._replace(posted=p.posted and p.pusher != at) for p in state.parts)
        return self._settled(self._now(state._replace(parts=parts), who, "dead")), OK

    def _announce(self, state: State, who: str) -> Step:
        at, rules = self.index[who], self.rules
        pusher = self.world.pushers[at]
        tried = state._replace(attempts=replaced(state.attempts, at, state.attempts[at] + 1))
        stranger = rules.named_pushers and not pusher.named
        has_arrived = state.arrived[pusher.rank] is not None and rules.arrival_is_final
        if not state.expecting or state.ready or stranger or has_arrived:
            return tried, UNKNOWN
        if rules.fence:
            tried = self._ended(tried, self._parts_of_rank(tried, pusher.rank))
        part = Part(at, tried.attempts[at])
        state = tried._replace(
            parts=tuple(sorted((*tried.parts, part))),
            current=replaced(state.current, pusher.rank, part.key),
            arrived=replaced(state.arrived, pusher.rank, None),
        )
        return self._settled(state), OK

    def _expire(self, state: State, who: str) -> Step:
        at = self.index[who]
        own = [part for part in state.parts if part.pusher == at and part.live and part.offered]
        return self._changed(state, own[0], own[0]._replace(offered=False)), OK

    def _land_part(self, state: State, who: str) -> Step:
        """A posted read of a part writes its piece, however late."""
        part = self._posted(state, who)
        rank = self.world.pushers[part.pusher].rank
        at = cells_of("request", rank, part.landed)
        cells = written(state.cells, at, self._tag(part.key))
        late = not part.live and self._writes_too_late(state, part)
        more = part.live and part.landed + 1 < PIECES
        now = part._replace(landed=part.landed + part.live, posted=more)
        state = self._changed(state, part, now)._replace(cells=cells)
        return self._settled(state._replace(late_write=who) if late else state), OK

    def _writes_too_late(self, state: State, part: Part) -> bool:
        """Whether the blocks are free, or another process fills them."""
        rank = self.world.pushers[part.pusher].rank
        others = [one for one in self._parts_of_rank(state, rank) if one.key != part.key]
        begun = any(one.posted or (one.live and one.landed) for one in others)
        return begun or ("expected", "request") not in state.claims

    def _sever_part(self, state: State, who: str) -> Step:
        at = self.index[who]
        part = next(one for one in state.parts if one.pusher == at and one.posted and not one.live)
        return self._settled(self._changed(state, part, part._replace(posted=False))), OK

    def _confirm_part(self, state: State, who: str) -> Step:
        at = self.index[who]
        own = [one for one in state.parts if one.pusher == at and one.live]
        part, rank = next(one for one in own if one.landed == PIECES), self.world.pushers[at].rank
        state = self._changed(state, part, part._replace(live=False))
        replaced_by_newer = self.rules.fence and state.current[rank] != part.key
        state = self._settled(state)
        if not part.offered or not state.expecting or replaced_by_newer:
            return state, EXPIRED
        state = state._replace(
            arrived=replaced(state.arrived, rank, part.key), told=replaced(state.told, at, True)
        )
        return (state if None in state.arrived else self._now_ready(state)), OK

    def _settled(self, state: State) -> State:
        """Begin to read where no older read can write, and free blocks that were forgotten."""
        for part in state.parts:
            if part.live and not part.posted and part.landed == 0:
                rank = self.world.pushers[part.pusher].rank
                late = any(p.posted and not p.live for p in self._parts_of_rank(state, rank))
                if not (late and self.rules.settle):
                    begun = part._replace(posted=part.offered, live=part.offered)
                    state = self._changed(state, part, begun)
        over = tuple(part for part in state.parts if part.live or part.posted)
        state = state._replace(parts=over)
        late = any(part.posted for part in state.parts)
        if state.forgetting and not (late and self.rules.settle):
            state = self._released(state, "request")._replace(forgetting=False)
        return state

    def _now_ready(self, state: State) -> State:
        """The request is complete, and the engine relies on it."""
        state = self._released(state, "request")
        promised = state.promised
        for rank, key in enumerate(state.arrived):
            assert key is not None
            for piece in range(PIECES):
                promised = written(promised, cells_of("request", rank, piece), self._tag(key))
        return state._replace(ready=True, promised=promised)

    # -- pulls ------------------------------------------------------------------------------

    def _pull(self, state: State, who: str) -> Step:
        at = self.index[who]
        tries = state.pulls[at].tries + 1
        claimed = self._claimed(state, "filling", who)
        if claimed is None:
            return self._with_pull(state, at, Pull(tries=tries)), IN_USE
        if not state.offered:
            return self._with_pull(state, at, Pull("failed", tries=tries)), UNKNOWN
        begun = Pull("running", 0, posted=True, leased=True, version=state.version, tries=tries)
        return self._with_buffer(self._with_pull(claimed, at, begun), who), OK

    def _land(self, state: State, who: str) -> Step:
        """A posted read writes its piece, with the bytes that the source has now."""
        if who not in self.world.pulls:
            return self._land_part(state, who)
        at = self.index[who]
        pull = state.pulls[at]
        tag = f"{who}{pull.tries} v{state.version}"
        if self.world.staged:
            return self._land_in_buffer(state._replace(buffer=tag), who), OK
        cells = written(state.cells, cells_of(who, None, pull.landed), tag)
        running = pull.status == "running"
        landed = pull.landed + 1
        now = pull._replace(landed=landed, posted=running and landed < PIECES)
        state = self._with_pull(state, at, now)._replace(cells=cells)
        if running:
            return state, OK
        if not self.rules.quarantine:
            return state._replace(late_write=who), OK
        return self._released(state, who), OK

    def _land_in_buffer(self, state: State, who: str) -> State:
        """A read has filled the buffer. A failed pull then has no more use for the buffer."""
        at = self.index[who]
        state = self._with_pull(state, at, state.pulls[at]._replace(posted=False))
        return state if state.pulls[at].status == "running" else self._without_buffer(state, who)

    def _place(self, state: State, who: str) -> Step:
        at = self.index[who]
        return self._with_pull(state, at, state.pulls[at]._replace(placing=state.buffer)), OK

    def _placed(self, state: State, who: str) -> Step:
        """A worker has copied a piece into the blocks, and reads the next one."""
        at = self.index[who]
        pull = state.pulls[at]
        cells = written(state.cells, cells_of(who, None, pull.landed), pull.placing)
        running, landed = pull.status == "running", pull.landed + 1
        now = pull._replace(landed=landed, posted=running and landed < PIECES, placing="")
        state = self._with_pull(state, at, now)._replace(cells=cells)
        if running:
            return state, OK
        if not self.rules.busy:
            return state._replace(late_write=who), OK
        return self._without_buffer(self._released(state, who), who), OK

    def _cancel(self, state: State, who: str) -> Step:
        at = self.index[who]
        pull = state.pulls[at]._replace(status="failed", leased=False)
        state = self._released(self._with_pull(state, at, pull), who)
        late = pull.posted and not self.world.staged and self.rules.quarantine
        if late or (pull.placing and self.rules.busy):
            state = state._replace(claims=state.claims | {("quarantined", who)})
        keeps = (pull.posted and self.rules.buffers) or (pull.placing and self.rules.busy)
        return (state if keeps else self._without_buffer(state, who)), OK

    def _sever(self, state: State, who: str) -> Step:
        if who not in self.world.pulls:
            return self._sever_part(state, who)
        at = self.index[who]
        state = self._with_pull(state, at, state.pulls[at]._replace(posted=False))
        state = self._without_buffer(state, who)
        return (self._released(state, who) if self.rules.quarantine else state), OK

    def _confirm(self, state: State, who: str) -> Step:
        if who not in self.world.pulls:
            return self._confirm_part(state, who)
        at = self.index[who]
        pull = state.pulls[at]
        state = self._without_buffer(self._released(state, who), who)
        if not pull.leased and self.rules.confirm:
            return self._with_pull(state, at, pull._replace(status="failed")), EXPIRED
        right = f"{who}{pull.tries} v{pull.version}"
        promised = written(state.promised, all_cells_of(BLOCKS_OF[who]), right)
        state = self._with_pull(state, at, pull._replace(status="ready", leased=False))
        return state._replace(promised=promised), OK

    # -- offers -----------------------------------------------------------------------------

    def _offer(self, state: State, who: str) -> Step:
        if who == "source":
            return state._replace(offered=True), OK
        claimed = self._claimed(state, "offered", "own")
        if claimed is None:
            return state, IN_USE
        promised = list(state.promised)
        for cell in all_cells_of(BLOCKS_OF["own"]):
            promised[cell] = state.cells[cell]  # offered blocks stay as they are
        return claimed._replace(promised=tuple(promised)), OK

    def _withdraw(self, state: State, who: str) -> Step:
        if who == "own":
            return self._released(state, "own"), OK
        pulls = tuple(pull._replace(leased=False) for pull in state.pulls)
        return state._replace(offered=False, pulls=pulls), OK

    def _rewrite(self, state: State, who: str) -> Step:
        assert who == "source"
        return state._replace(version=state.version + 1), OK

    # -- the ledger and the announced parts -------------------------------------------------

    def _claimed(self, state: State, use: str, owner: str) -> State | None:
        """Return the state with one more claim; None if another claim conflicts."""
        mine = set(BLOCKS_OF[owner])
        shared = use == "offered"
        for other_use, other in state.claims if self.rules.claims else ():
            if mine & set(BLOCKS_OF[other]) and not (shared and other_use == "offered"):
                return None
        promised = state.promised
        if not shared:
            promised = written(promised, all_cells_of(mine), "")
        return state._replace(claims=state.claims | {(use, owner)}, promised=promised)

    def _released(self, state: State, owner: str) -> State:
        return state._replace(claims=frozenset(c for c in state.claims if c[1] != owner))

    def _with_buffer(self, state: State, who: str) -> State:
        return state._replace(buffer_of=who) if self.world.staged else state

    def _without_buffer(self, state: State, who: str) -> State:
        return state._replace(buffer_of="") if state.buffer_of == who else state

    def _ended(self, state: State, parts: Iterable[Part]) -> State:
        """End pulls of parts. A read that is posted may still land; `_settled` waits for it."""
        for part in parts:
            if part.live:
                state = self._changed(state, part, part._replace(live=False))
        return state

    def _parts_of_rank(self, state: State, rank: int) -> list[Part]:
        pushers = self.world.pushers
        return [part for part in state.parts if pushers[part.pusher].rank == rank]

    def _posted(self, state: State, who: str) -> Part:
        """Return the oldest part of a pusher with a posted read."""
        at = self.index[who]
        return next(part for part in state.parts if part.pusher == at and part.posted)

    def _changed(self, state: State, part: Part, now: Part) -> State:
        return state._replace(parts=tuple(now if one == part else one for one in state.parts))

    def _with_pull(self, state: State, at: int, pull: Pull) -> State:
        return state._replace(pulls=replaced(state.pulls, at, pull))

    def _now(self, state: State, who: str, status: str) -> State:
        if who == "source":
            return state._replace(source=status)
        return state._replace(processes=replaced(state.processes, self.index[who], status))

    def _tag(self, key: Key) -> str:
        return f"{self.world.pushers[key[0]].name}#{key[1]}"

    # -- invariants -------------------------------------------------------------------------

    def violations(self, state: State) -> list[str]:
        """Return the invariants that a state breaks.

        `late write`: no read that was given up writes to a block that was freed, or that a
        replacement fills. `wrong bytes`: blocks of a ready request or pull,
        of an offer, or in use by the engine have exactly the bytes that were confirmed. `two
        owners`: a block has one exclusive owner or only readers, and a quarantined block has no
        other claim. `unnamed pusher`: a ready request comes from processes that were named. `lost
        arrival`: if a pusher of every rank was told that it is complete, the request is ready.
        """
        pushers = self.world.pushers
        told = {one.rank for one, yes in zip(pushers, state.told, strict=True) if yes and one.named}
        broken = {
            "late write": state.late_write != "",
            "wrong bytes": self._has_wrong_bytes(state),
            "two owners": len(state.claims) > 1 and self._has_two_owners(state.claims),
            "unnamed pusher": state.ready
            and not all(pushers[key[0]].named for key in state.arrived if key),
            "lost arrival": state.expecting and not state.ready and len(told) == RANKS,
        }
        return [name for name, is_broken in broken.items() if is_broken]

    def _has_wrong_bytes(self, state: State) -> bool:
        return any(right not in ("", now) for now, right in zip(*state[:2], strict=True))

    def _has_two_owners(self, claims: frozenset[tuple[str, str]]) -> bool:
        uses: list[list[str]] = [[] for _ in range(BLOCKS)]
        for use, owner in claims:
            for block in BLOCKS_OF[owner]:
                uses[block].append(use)
        return any(len(own) > 1 and set(own) != {"offered"} for own in uses)


class Search(NamedTuple):
    """The outcome of a search: the number of states, and the way to a violation if there is one."""

    states: int
    violation: str = ""
    trace: tuple[Event, ...] = ()

    def __str__(self) -> str:
        if not self.violation:
            return f"no violation in {self.states:,} states"
        return f"{self.violation}: {', then '.join(map(str, self.trace))}"


def search(model: Model, only: Iterable[str] = ()) -> Search:
    """Visit every reachable state, breadth first, and return the shortest way to a violation.

    `only` names the invariants that count; all do if it is empty.
    """
    wanted = frozenset(only)
    came_from: dict[State, tuple[State, Event] | None] = {model.first: None}
    level = [model.first]
    while level:
        following: list[State] = []
        for state in level:
            for event in model.possible(state):
                after, _ = model.step(state, event)
                if after in came_from:
                    continue
                came_from[after] = (state, event)
                for broken in model.violations(after):
                    if not wanted or broken in wanted:
                        return Search(len(came_from), broken, tuple(_trace(came_from, after)))
                following.append(after)
        level = following
    return Search(len(came_from))


def _trace(came_from: dict[State, tuple[State, Event] | None], state: State) -> list[Event]:
    events: list[Event] = []
    while (before := came_from[state]) is not None:
        state, event = before
        events.append(event)
    return events[::-1]
