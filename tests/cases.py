"""Many small cases in one test: thousands of tests that take a millisecond each cost minutes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def each(cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test that tries all cases in turn; the failure says which it was.

    A case that is a tuple gives several arguments.
    """
    tried = list(cases)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def all_cases(*self: Any) -> None:
            for case in tried:
                try:
                    test(*self, *(case if isinstance(case, tuple) else (case,)))
                except BaseException as error:
                    error.add_note(f"case: {case}")
                    raise

        all_cases.__name__, all_cases.__doc__ = test.__name__, test.__doc__
        return all_cases

    return decorate
