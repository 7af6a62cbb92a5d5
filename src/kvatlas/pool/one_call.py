"""`one_call_at_a_time`: refuse calls of one object that overlap in time."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from kvatlas.errors import AtlasError, Code

Given = ParamSpec("Given")
Result = TypeVar("Result")


class CallGuard:
    """A flag that one call at a time can hold.

    If `copy` or `pickle` duplicates the flag, no call holds the duplicate.
    """

    def __init__(self) -> None:
        self._lock = Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            problem = "A call began before another call of the same pool ended"
            hint = "Use one thread or a lock for all calls, and do not call the pool from `events`"
            raise AtlasError(Code.CONCURRENT_CALLS, problem, got="two calls at once", hint=hint)

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[CallGuard], tuple[()]]:
        return CallGuard, ()


class Guarded(Protocol):
    """An object with a `CallGuard` that its guarded methods share."""

    _calls: CallGuard


Self = TypeVar("Self", bound=Guarded)


def one_call_at_a_time(
    method: Callable[Concatenate[Self, Given], Result],
) -> Callable[Concatenate[Self, Given], Result]:
    """Make a method raise `concurrent_calls` while another call of the same object runs."""

    @wraps(method)
    def guarded(self: Self, /, *args: Given.args, **options: Given.kwargs) -> Result:
        with self._calls:
            return method(self, *args, **options)

    return guarded
