"""Operations that this process carries out itself, a step at each poll."""

from __future__ import annotations

from collections.abc import Iterator

from kvatlas.errors import AtlasError
from kvatlas.wire.transports.base import Handle
from kvatlas.wire.transports.errors import cancelled, failed


class Stepwise(Handle):
    """An operation of steps: polling does the next one.

    >>> work = Stepwise(iter([None, None]))
    >>> work.poll(), work.poll(), work.poll()
    (False, False, True)
    """

    def __init__(self, steps: Iterator[None]) -> None:
        self._steps = steps
        self._done = False
        self._failure: AtlasError | None = None

    def poll(self) -> bool:
        """Do one step."""
        if self._failure is not None:
            raise self._failure
        if not self._done:
            try:
                next(self._steps)
            except StopIteration:
                self._done = True
            except AtlasError as failure:
                self._failure = failure
                raise
            except Exception as problem:
                # Steps that have raised look finished when asked again: they are not.
                self._failure = failed(f"{type(problem).__name__}: {problem}")
                raise self._failure from problem
        return self._done

    def _pause(self, seconds: float) -> None:
        """Nobody else has to act: the next step follows at once."""

    def release(self) -> None:
        """Do no further step."""
        if not self._done and self._failure is None:
            self._failure = cancelled()
        self._steps = iter(())
