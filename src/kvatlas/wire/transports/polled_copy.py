"""Operations that this process performs itself, one step at each poll."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from kvatlas.copying.memory_copy import copy_runs_unchecked
from kvatlas.copying.run_bounds import Bytes
from kvatlas.routing import Copy
from kvatlas.wire.transports import errors
from kvatlas.wire.transports.base import Handle


class Stepwise(Handle):
    """An operation of several steps. Each poll performs the next one.

    >>> work = Stepwise(iter([None, None]))
    >>> work.poll(), work.poll(), work.poll()
    (False, False, True)
    """

    def __init__(self, steps: Iterator[None]) -> None:
        self._steps = steps
        self._stepping = threading.Lock()
        self._given_up = False

    def _poll(self) -> bool:
        with self._stepping:
            if self._given_up:
                raise errors.cancelled()
            try:
                next(self._steps)
            except StopIteration:
                return True
        return False

    def _pause(self, seconds: float) -> None:
        """Do not pause: the next step depends on no other process."""

    def _release(self) -> None:
        """No further step; one that another thread is in comes to its end."""
        self._given_up = True

    def _settle(self) -> bool:
        """Over where no step is running, and none will."""
        if not self._stepping.acquire(blocking=False):
            return False
        try:
            over = self._given_up or self._failure is not None
            if over:
                self._steps = iter(())  # lets go of the memory
        finally:
            self._stepping.release()
        return over


def copy_steps(
    ends: Iterable[tuple[Bytes, Bytes, Copy]], check: Callable[[], None]
) -> Iterator[None]:
    """Return copies between buffers of this process. `check` is called around every step."""
    for source, target, copy in ends:
        check()
        for _ in copy_runs_unchecked(source, target, copy.src, copy.dst, copy.length):
            yield
            check()
    check()
