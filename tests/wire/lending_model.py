"""An explicit-state model of staging buffers that are lent to readers, and reclaimed from them.

A source has one buffer for peers. Readers `a` and `b` pull a request of two pieces through it. Any
reader can be stopped and continue; whoever waits has the buffer reclaimed from the other.

| event | caused by | effect |
|---|---|---|
| `borrow` | a reader | open a lease and get the buffer, if it is free |
| `gather`, `fill` | a reader, the source | ask for the next piece; it is copied into the buffer |
| `read` | a reader | take the bytes that are in the buffer now |
| `close` | a reader | have the source confirm that the buffer was lent until now |
| `reclaim` | the source | take the buffer from a lease, for another reader |
| `stop`, `continue` | an operator | SIGSTOP, SIGCONT |

Bytes are tags: the lease and the piece. `Rules` can be removed one by one; `search` of
`protocol_model` then finds the shortest way to break an invariant. `Model.violations` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.wire.protocol_model import Event, replaced

PIECES = 2
READERS = ("a", "b")
OK, RECLAIMED, NONE_FREE = "ok", "buffers_reclaimed", "none free"


@dataclass(frozen=True)
class Rules:
    """The rules of lending. Each can be removed."""

    gather_checks: bool = True
    """A piece is gathered only for a lease that still has its buffer."""
    confirm: bool = True
    """A pull is ready only if its buffer was not reclaimed before `close`."""
    drain: bool = True
    """Whoever reclaims a buffer waits for the copy into it that is in progress."""
    segments: bool = False
    """Each reader has its own memory, which is wiped when it is reclaimed."""


class Reader(NamedTuple):
    """A process that pulls, and its current lease."""

    stopped: bool = False
    attempt: int = 0
    status: str = "idle"
    """`idle`, `leased`, `ready` or `failed`; a reader that is refused is idle again."""
    lent: bool = False
    reclaimed: bool = False
    filling: bool = False
    gathered: int = 0
    read: tuple[str, ...] = ()
    """The tags of the bytes that it has taken for its pieces."""


class State(NamedTuple):
    """The readers, and the content of the memory of each; all share the first without segments."""

    readers: tuple[Reader, ...] = (Reader(),) * len(READERS)
    memory: tuple[str, ...] = ("",) * len(READERS)
    foreign: str = ""
    """The reader that has seen a byte of another; empty if none has."""


Step = tuple[State, str]


@dataclass(frozen=True)
class Model:
    """Two readers and one buffer, under some rules."""

    rules: Rules = field(default_factory=Rules)
    attempts: int = 2
    first: State = field(default_factory=State)

    def step(self, state: State, event: Event) -> Step:
        """Return the state after a possible event, and the event's outcome."""
        act: Callable[[State, int], Step] = getattr(self, f"_{event.action}")
        return act(state, READERS.index(event.who))

    def possible(self, state: State) -> Iterator[Event]:
        """Yield the events that can happen in a state."""
        for at, name in enumerate(READERS):
            for action in self._actions(state, at):
                yield Event(action, name)

    def _actions(self, state: State, at: int) -> Iterator[str]:
        one, other = state.readers[at], state.readers[1 - at]
        if one.filling:  # by the source, whatever the reader does
            yield "fill"
        if one.lent and other.status == "idle" and not (self.rules.drain and one.filling):
            yield "reclaim"
        yield "continue" if one.stopped else "stop"
        if one.stopped or one.filling:
            return
        if one.status == "idle" and one.attempt < self.attempts:
            yield "borrow"
        if one.status == "leased":
            if one.gathered > len(one.read):
                yield "read"
            else:
                yield "close" if len(one.read) == PIECES else "gather"

    # -- events -----------------------------------------------------------------------------

    def _stop(self, state: State, at: int) -> Step:
        return self._with(state, at, state.readers[at]._replace(stopped=True)), OK

    def _continue(self, state: State, at: int) -> Step:
        return self._with(state, at, state.readers[at]._replace(stopped=False)), OK

    def _borrow(self, state: State, at: int) -> Step:
        if any(one.lent for one in state.readers):
            return state, NONE_FREE
        attempt = state.readers[at].attempt + 1
        return self._with(state, at, Reader(attempt=attempt, status="leased", lent=True)), OK

    def _gather(self, state: State, at: int) -> Step:
        one = state.readers[at]
        if self.rules.gather_checks and not one.lent:
            return self._refused(state, at)
        return self._with(state, at, one._replace(filling=True)), OK

    def _fill(self, state: State, at: int) -> Step:
        one = state.readers[at]
        memory = replaced(state.memory, self._place(at), self._tag(at, one, one.gathered))
        filled = one._replace(filling=False, gathered=one.gathered + 1)
        return self._with(state, at, filled)._replace(memory=memory), OK

    def _read(self, state: State, at: int) -> Step:
        one, tag = state.readers[at], state.memory[self._place(at)]
        foreign = state.foreign
        if tag and not tag.startswith(READERS[at]):
            foreign = READERS[at]
        read = one._replace(read=(*one.read, tag))
        return self._with(state, at, read)._replace(foreign=foreign), OK

    def _close(self, state: State, at: int) -> Step:
        one = state.readers[at]
        if self.rules.confirm and one.reclaimed:
            return self._refused(state, at)
        return self._with(state, at, one._replace(status="ready", lent=False)), OK

    def _reclaim(self, state: State, at: int) -> Step:
        one = state.readers[at]._replace(lent=False, reclaimed=True)
        memory = state.memory
        if self.rules.segments:
            memory = replaced(memory, self._place(at), "")
        return self._with(state, at, one)._replace(memory=memory), OK

    # -- inside -----------------------------------------------------------------------------

    def _refused(self, state: State, at: int) -> Step:
        again = Reader(attempt=state.readers[at].attempt)
        return self._with(state, at, again), RECLAIMED

    def _place(self, at: int) -> int:
        return at if self.rules.segments else 0

    def _tag(self, at: int, one: Reader, piece: int) -> str:
        return f"{READERS[at]}{one.attempt} {piece}"

    def _with(self, state: State, at: int, one: Reader) -> State:
        return state._replace(readers=replaced(state.readers, at, one))

    def violations(self, state: State) -> list[str]:
        """Return the invariants that a state breaks.

        `wrong bytes`: a pull that is ready has its own pieces, in order. `two holders`: one lease
        at most has the buffer. `foreign bytes`: with segments, no reader ever sees bytes of
        another, whatever becomes of its pull.
        """
        broken = {
            "wrong bytes": any(
                one.status == "ready"
                and one.read != tuple(self._tag(at, one, piece) for piece in range(PIECES))
                for at, one in enumerate(state.readers)
            ),
            "two holders": sum(one.lent for one in state.readers) > 1,
            "foreign bytes": self.rules.segments and state.foreign != "",
        }
        return [name for name, is_broken in broken.items() if is_broken]
