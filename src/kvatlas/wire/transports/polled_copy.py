"""Operations that this process carries out itself, a step at each poll."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from kvatlas.routing import Copy
from kvatlas.wire.memory_copy import Bytes, copy_runs
from kvatlas.wire.transports.base import Handle


class Stepwise(Handle):
    """An operation of steps: polling does the next one.

    >>> work = Stepwise(iter([None, None]))
    >>> work.poll(), work.poll(), work.poll()
    (False, False, True)
    """

    def __init__(self, steps: Iterator[None]) -> None:
        self._steps = steps

    def _poll(self) -> bool:
        try:
            next(self._steps)
        except StopIteration:
            return True
        return False

    def _pause(self, seconds: float) -> None:
        """Nobody else has to act: the next step follows at once."""

    def _release(self) -> None:
        self._steps = iter(())


def copy_steps(
    ends: Iterable[tuple[Bytes, Bytes, Copy]], check: Callable[[], None]
) -> Iterator[None]:
    """Copies between buffers that this process can reach; `check` is called around every step."""
    for source, target, copy in ends:
        check()
        for _ in copy_runs(source, target, copy.src, copy.dst, copy.length):
            yield
            check()
    check()
