"""An explicit-state model of block ownership on the wire, searched exhaustively.

The model has one destination node with three blocks. Processes push a request into two of them,
one process per source rank; pulls `a` and `b` of the node read from one source; the node offers a
block of its own; its engine uses blocks that have no claim. `Model.step` defines what each event
does and which error it gets. Bytes are tags: which lease or which pull wrote a piece.

Who causes which event:

| event | caused by | effect |
|---|---|---|
| `expect`, `forget` | the node | claim blocks for a push; end its leases and free the blocks |
| `open`, `fetch`, `close` | a pusher | get a lease and fence older ones; have a piece read; end |
| `read`, `copy` | the node | a piece arrives in a staging buffer; it is copied to the blocks |
| `expire` | time | a lease ends |
| `start`, `stop`, `continue`, `kill` | an operator | a replacement, SIGSTOP, SIGCONT, SIGKILL |
| `pull`, `cancel`, `confirm` | the node | claim and fill blocks; give up; have the source confirm |
| `land`, `sever` | the transport | a posted read writes its piece, also late; it never will |
| `offer`, `withdraw`, `rewrite` | a source, the node | let blocks be read; end that; reuse them |
| `use` | the engine | write to every block that has no claim |

A process is delayed by taking none of its events. Duplicates of `fetch` and `close` are refused
in every state, so they add no state; a second `open` is one more attempt.

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
"""A lease of a pusher: the pusher's index and its attempt."""


@dataclass(frozen=True)
class Rules:
    """The rules of ownership. Each can be removed."""

    fence: bool = True
    """A new lease of a rank ends the older ones; only the newest can be confirmed."""
    arrival_is_final: bool = True
    """A rank that has arrived is not pushed again."""
    named_pushers: bool = True
    """Only processes that `expect` names may push."""
    claims: bool = True
    """Blocks are filled by one operation, or read by any number."""
    quarantine: bool = True
    """A failed pull keeps its blocks until its posted read cannot write to them."""
    confirm: bool = True
    """A pull is ready only if the source has held the blocks until the last byte was read."""
    drain: bool = True
    """Whoever ends a lease waits for the copy that is in progress for it."""


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
    offers: bool = False
    """Whether the node offers a block of its own."""
    attempts: int = 1
    """Leases that one pusher opens, and times that one pull is started."""
    expectations: int = 1
    rewrites: int = 1
    """Times that the source of the pulls reuses its blocks."""
    slow_copies: bool = False
    """Whether other events can happen while the node copies a piece to its blocks."""
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


class Lease(NamedTuple):
    """A pusher's right to fill its part of the request's blocks."""

    pusher: int
    attempt: int
    fetched: int = 0
    doing: str = ""
    """`reading` a piece from the pusher, `copying` it to the blocks, or empty."""
    live: bool = True

    @property
    def key(self) -> Key:
        return self.pusher, self.attempt


class Pull(NamedTuple):
    """A pull of the node. While it runs, a read is posted, or all pieces have landed."""

    status: str = "none"
    landed: int = 0
    posted: bool = False
    leased: bool = False
    """Whether the source still holds the lease."""
    version: int = 0
    """The content of the source's blocks when the lease was opened."""
    tries: int = 0


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
    ready: bool = False
    current: tuple[Key | None, ...] = (None,) * RANKS
    arrived: tuple[Key | None, ...] = (None,) * RANKS
    leases: tuple[Lease, ...] = ()
    source: str = "running"
    offered: bool = True
    version: int = 0
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
        if state.expecting and not self._waits_for_copy(state.leases):
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
            rank = self._leases_of_rank(state, pusher.rank)
            if state.attempts[at] < world.attempts and not self._waits_for_copy(rank):
                yield "open"
        if status == "stopped":
            yield "continue"
        if status != "dead" and f"kill {pusher.name}" in world.faults:
            yield "kill"
        yield from self._lease_actions(state, at)

    def _lease_actions(self, state: State, at: int) -> Iterator[str]:
        running = state.processes[at] == "running"
        newest = self._newest(state, at)
        name = self.world.pushers[at].name
        if newest and newest.live and f"expire {name}" in self.world.faults:
            yield from () if self._waits_for_copy([newest]) else ("expire",)
        if newest and not newest.doing and running:
            yield "fetch" if newest.fetched < PIECES else "close"
        doing = {lease.doing for lease in state.leases if lease.pusher == at}
        if "reading" in doing and running:
            yield "read"
        if "copying" in doing:
            yield "copy"

    def _pull_actions(self, state: State, pull: Pull) -> Iterator[str]:
        over = pull.status in ("none", "ready", "failed") and not pull.posted
        if over and pull.tries < self.world.attempts and state.source == "running":
            yield "pull"
        if pull.status == "running":
            yield "cancel"
        if pull.posted and state.source == "running":
            yield "land"
        if pull.posted and pull.status == "failed":
            yield "sever"
        if pull.status == "running" and pull.landed == PIECES:
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
        state = self._ended(state, state.leases)
        return self._released(state, "request")._replace(expecting=False, ready=False), OK

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
        """Kill a process. Reads from its memory fail; its leases end when they expire."""
        at = self.index[who]
        reading = [lease for lease in state.leases if lease.pusher == at and lease.doing]
        for lease in reading:
            if lease.doing == "reading":
                state = self._changed(state, lease, lease._replace(doing=""))
        return self._now(state, who, "dead"), OK

    def _open(self, state: State, who: str) -> Step:
        at, rules = self.index[who], self.rules
        pusher = self.world.pushers[at]
        tried = state._replace(attempts=replaced(state.attempts, at, state.attempts[at] + 1))
        stranger = rules.named_pushers and not pusher.named
        has_arrived = state.arrived[pusher.rank] is not None and rules.arrival_is_final
        if not state.expecting or state.ready or stranger or has_arrived:
            return tried, UNKNOWN
        idle = [lease for lease in state.leases if lease.pusher == at and not lease.doing]
        lease = Lease(at, tried.attempts[at])
        state = self._without(tried, idle)  # the process no longer uses its earlier leases
        if rules.fence:
            state = self._ended(state, self._leases_of_rank(state, pusher.rank))
        return state._replace(
            leases=tuple(sorted((*state.leases, lease))),
            current=replaced(state.current, pusher.rank, lease.key),
            arrived=replaced(state.arrived, pusher.rank, None),
        ), OK

    def _fetch(self, state: State, who: str) -> Step:
        lease = self._newest(state, self.index[who])
        assert lease is not None
        if not lease.live:
            return self._without(state, [lease]), EXPIRED
        return self._changed(state, lease, lease._replace(doing="reading")), OK

    def _read(self, state: State, who: str) -> Step:
        lease = self._doing(state, who, "reading")
        if not lease.live:
            return self._without(state, [lease]), EXPIRED
        copying = lease._replace(doing="copying")
        state = self._changed(state, lease, copying)
        return (state, OK) if self.world.slow_copies else self._copy(state, who)

    def _copy(self, state: State, who: str) -> Step:
        lease = self._doing(state, who, "copying")
        at = cells_of("request", self.world.pushers[lease.pusher].rank, lease.fetched)
        cells = written(state.cells, at, self._tag(lease.key))
        late = state.late_write if lease.live else who
        done = lease._replace(doing="", fetched=lease.fetched + 1)
        return self._changed(state, lease, done)._replace(cells=cells, late_write=late), OK

    def _close(self, state: State, who: str) -> Step:
        at = self.index[who]
        lease, rank = self._newest(state, at), self.world.pushers[at].rank
        assert lease is not None
        state = self._without(state, [lease])
        replaced_by_newer = self.rules.fence and state.current[rank] != lease.key
        if not lease.live or not state.expecting or replaced_by_newer:
            return state, EXPIRED
        state = state._replace(
            arrived=replaced(state.arrived, rank, lease.key),
            told=replaced(state.told, at, True),
        )
        return (state if None in state.arrived else self._now_ready(state)), OK

    def _expire(self, state: State, who: str) -> Step:
        lease = self._newest(state, self.index[who])
        assert lease is not None
        return self._ended(state, [lease]), OK

    def _now_ready(self, state: State) -> State:
        """The request is complete: no lease may write to it, and the engine relies on it."""
        state = self._released(self._ended(state, state.leases), "request")
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
        return self._with_pull(claimed, at, begun), OK

    def _land(self, state: State, who: str) -> Step:
        """A posted read writes its piece, with the bytes that the source has now."""
        at = self.index[who]
        pull = state.pulls[at]
        tag = f"{who}{pull.tries} v{state.version}"
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

    def _cancel(self, state: State, who: str) -> Step:
        at = self.index[who]
        pull = state.pulls[at]._replace(status="failed", leased=False)
        state = self._released(self._with_pull(state, at, pull), who)
        if pull.posted and self.rules.quarantine:
            state = state._replace(claims=state.claims | {("quarantined", who)})
        return state, OK

    def _sever(self, state: State, who: str) -> Step:
        at = self.index[who]
        state = self._with_pull(state, at, state.pulls[at]._replace(posted=False))
        return (self._released(state, who) if self.rules.quarantine else state), OK

    def _confirm(self, state: State, who: str) -> Step:
        at = self.index[who]
        pull = state.pulls[at]
        state = self._released(state, who)
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

    # -- the ledger and the leases ----------------------------------------------------------

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

    def _ended(self, state: State, leases: Iterable[Lease]) -> State:
        """End leases. A copy that is in progress goes on; `possible` waits for it."""
        for lease in leases:
            if lease.live:
                state = self._changed(state, lease, lease._replace(live=False))
        return state

    def _waits_for_copy(self, leases: Iterable[Lease]) -> bool:
        """Whether ending these leases has to wait."""
        return self.rules.drain and any(lease.doing == "copying" for lease in leases)

    def _leases_of_rank(self, state: State, rank: int) -> list[Lease]:
        pushers = self.world.pushers
        return [lease for lease in state.leases if pushers[lease.pusher].rank == rank]

    def _newest(self, state: State, at: int) -> Lease | None:
        own = [lease for lease in state.leases if lease.key == (at, state.attempts[at])]
        return own[0] if own else None

    def _doing(self, state: State, who: str, what: str) -> Lease:
        """Return the oldest lease of a pusher for which the node does something."""
        at = self.index[who]
        return next(one for one in state.leases if one.pusher == at and one.doing == what)

    def _changed(self, state: State, lease: Lease, now: Lease) -> State:
        if not now.live and not now.doing and now.attempt < state.attempts[now.pusher]:
            return self._without(state, [lease])
        return state._replace(leases=tuple(now if one == lease else one for one in state.leases))

    def _without(self, state: State, gone: Iterable[Lease]) -> State:
        kept = tuple(lease for lease in state.leases if lease not in tuple(gone))
        return state._replace(leases=kept)

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

        `late write`: no lease that was fenced, has ended or was forgotten writes, and no failed
        pull writes to a block that was freed. `wrong bytes`: blocks of a ready request or pull,
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
