"""What is claimed of wires, and how often it held."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from kvatlas import AtlasError
from kvatlas.wire import Session, Transfer
from tests.attack.plans import Wire, after, source_plan, target_plan
from tests.wire.child import Child, Json, Rank, contents
from tests.wire.helpers import waited

SLACK = 3.0
"""Seconds past its time after which something counts as hanging: the machine may be busy."""


@dataclass
class Outcome:
    """How often a claim was tried and held, and how often the strike met a transfer under way."""

    tries: int = 0
    held: int = 0
    hits: int | None = None
    faults: dict[str, int] = field(default_factory=dict)
    """What was found wrong, and how often."""
    aborts: int = 0
    """Processes that the transport's library has ended, as it is known to: no tries."""
    noted: Callable[[Outcome], None] = lambda _: None
    """Told of every try, as the next may end this process."""

    def add(self, faults: list[str], *, hit: bool | None = None) -> None:
        self.tries += 1
        self.held += not faults
        if hit is not None:
            self.hits = (self.hits or 0) + hit
        for fault in faults:
            self.faults[fault] = self.faults.get(fault, 0) + 1
        self.noted(self)

    def as_json(self) -> Json:
        return {name: getattr(self, name) for name in ("tries", "held", "hits", "faults", "aborts")}


@dataclass(frozen=True)
class Attack:
    """What an attack is given: over which wire, how often, with which requests."""

    wire: Wire
    tries: int
    tokens: int
    seed: int
    noted: Callable[[Outcome], None] = lambda _: None

    @property
    def rng(self) -> random.Random:
        return random.Random(f"{self.seed} {self.wire.label}")  # noqa: S311


class Destination:
    """The node of this process, into which sources in other processes move requests."""

    def __init__(self, attack: Attack, **node: Any) -> None:
        self.attack, self.wire, self.tokens = attack, attack.wire, attack.tokens
        self.rng = attack.rng
        self.node = attack.wire.node | node
        """How nodes are made here."""
        self.destination = target_plan(self.tokens)
        self.here = Rank(self.destination, self.wire.name, 7, self.tokens, **self.node)
        self.requests = 0
        self.aborts = 0
        """Processes that the transport's library has ended since the last look."""

    def name(self) -> str:
        self.requests += 1
        return f"request {self.requests}"

    def pull(self, session: Session, request: str, **about: Any) -> Transfer:
        return session.pull(
            request, destination_blocks=self.here.blocks, tokens=self.tokens, **about
        )

    def nothing_left(self, seconds: float = 10.0) -> list[str]:
        """Leases, staging buffers and operations that were given up are all back."""
        if waited(self.here.idle, seconds):
            return []
        return [f"{what} left" for what, many in self.here.left().items() if many]

    def ended(self, code: int | None, words: str) -> list[str]:
        """How a process ended that nobody killed: by the transport's library, or by a fault."""
        if self.wire.aborts and code in (-signal.SIGABRT, -signal.SIGSEGV):
            self.aborts += 1
            return []
        return [] if code in (0, -signal.SIGKILL) else [words.format(code)]


class Scene(Destination):
    """The node of this process, a source that is struck, and one that is well."""

    def __init__(self, attack: Attack) -> None:
        super().__init__(attack)
        self.source = source_plan(self.tokens)
        self.struck, self.well = self.start_source(1), self.start_source(2)
        self.right = {
            seed: after(self.source, seed, self.destination, 7, self.tokens) for seed in (1, 2)
        }
        self.right[7] = contents(self.destination, 7)
        self.right_source = contents(self.source, 1)
        self.seconds = {how: self._typical(how) for how in ("direct", "staged")}

    def start_source(self, seed: int) -> Child:
        about = {"tokens": self.tokens, "settings": self.wire.settings} | self.wire.node
        return Child().start(self.source, self.wire.name, seed, **about)

    def _typical(self, how: str) -> float:
        """Seconds that a pull takes when nothing is wrong."""
        taken = []
        with Session(self.here.node, [self.struck.endpoint]) as session:
            for _ in range(3):
                begun = time.monotonic()
                self.pull(session, self.offered(self.struck), how=how, timeout=30).wait()
                taken.append(time.monotonic() - begun)
        return min(taken)

    def offered(self, by: Child, **about: Any) -> str:
        request = self.name()
        by.ask("offer", request=request, **about)
        return request

    def refill(self, **about: Any) -> list[str]:
        """The blocks are given to another request, from the source that is well."""
        request = self.offered(self.well)
        try:
            with Session(self.here.node, [self.well.endpoint]) as session:
                self.pull(session, request, checksums=True, timeout=20, **about).wait()
        except AtlasError as refused:
            return [f"the next transfer ended in {refused.code}"]
        return self.holds(2, "wrong bytes in the next transfer")

    def holds(self, seed: int, fault: str) -> list[str]:
        """Every byte is of that source's request, and nothing beside it has changed."""
        return [fault] if self.here.wrong(self.right[seed]) else []

    def revived(self) -> list[str]:
        """Every source lives and goes on; those that nobody killed should have lived."""
        faults = []
        self.aborts = 0
        for name, seed in (("struck", 1), ("well", 2)):
            far: Child = getattr(self, name)
            far.go_on()
            time.sleep(0.02)
            if not far.process.is_alive():
                faults += self.ended(far.close(), "a source died by itself ({})")
                setattr(self, name, self.start_source(seed))
        return faults

    def close(self) -> list[str]:
        self.aborts, faults = 0, list[str]()
        for far in (self.struck, self.well):
            faults += self.ended(far.close(), "a process ended with {}")
        self.here.close()
        return faults


def code_of(transfer: Transfer, seconds: float) -> str:
    """How a transfer ends within some seconds."""
    try:
        transfer.wait(seconds)
    except AtlasError as refused:
        return str(refused.code) if transfer.done else "hangs"
    return "ready"


class Struck(Protocol):
    """A scene as `repeated` sees it."""

    aborts: int

    def revived(self) -> list[str]: ...

    def close(self) -> list[str]: ...


S = TypeVar("S", bound=Struck)
Claim = Callable[[Attack], Outcome]
Try = Callable[[S], tuple[list[str], bool | None]]
"""One strike: what was wrong, and whether it met a transfer under way."""


def repeated(attack: Attack, one: Try[Scene], tries: int | None = None) -> Outcome:
    """Strike again and again; a process that dies of it is a fault, and is replaced.

    A try in which the transport's library ended a process is made again, unless bytes were wrong.
    """
    return repeated_in(Scene(attack), attack, one, tries)


def repeated_in(scene: S, attack: Attack, one: Try[S], tries: int | None = None) -> Outcome:
    """The same in a scene of the caller, which is closed at the end."""
    outcome = Outcome(noted=attack.noted)
    wanted = attack.tries if tries is None else tries
    try:
        while outcome.tries < wanted and outcome.aborts <= wanted:
            try:
                faults, hit = one(scene)
            except (EOFError, OSError, AssertionError) as problem:
                faults, hit = [f"{type(problem).__name__} from a process: {problem}"], None
            faults += scene.revived()
            outcome.aborts += scene.aborts
            if not scene.aborts or any("bytes" in fault for fault in faults):
                outcome.add(faults, hit=hit)
    finally:
        ended = scene.close()
        outcome.aborts += scene.aborts
    if ended:
        outcome.add(ended)
    return outcome
