"""Sizes, offsets and times from outside become plain numbers here, or a coded refusal.

Python ints never wrap but the int64 of numpy, torch and every transport does,
so nothing past 2**63 - 1 may enter a value. Floats are refused even where they
are whole: a float that is whole today is 2096.0000001 after the next division.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from operator import index
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError, Code

INT64_MAX = 2**63 - 1
MOST_SECONDS = 86_400
"""Seconds that anything is waited for at most: a day."""


Whole = TypeVar("Whole", int, NDArray[np.int64])
"""A number, or many at once."""


def ceil_div(a: Whole, b: int) -> Whole:
    """`a / b` rounded up.

    >>> ceil_div(2134016, 16384)
    131
    """
    return -(-a // b)


def at_most(a: Whole, b: int) -> Whole:
    """`a`, or `b` where that is less.

    >>> at_most(7, 5), at_most(np.array([3, 7]), 5).tolist()
    (5, [3, 5])
    """
    return min(a, b) if isinstance(a, int) else np.minimum(a, b)


def round_up(value: int, multiple: int) -> int:
    """The next multiple of `multiple` from `value` on.

    >>> round_up(37376, 576)
    37440
    """
    return ceil_div(value, multiple) * multiple


def set_fields(value: object, **fields: Any) -> None:
    """Set fields of a frozen dataclass to their canonical values, in its `__post_init__`."""
    for name, field in fields.items():
        object.__setattr__(value, name, field)


def are_plain(numbers: Sequence[object], least: int) -> bool:
    """Whether all of them are ints from `least` on that fit in 64 bits, and need no other look.

    >>> are_plain((4, 0), 0), are_plain((4, 0), 1), are_plain((4.0,), 1), are_plain((True,), 1)
    (True, False, False, False)
    """
    return all(type(number) is int and least <= number <= INT64_MAX for number in numbers)


def _refusal(code: Code, what: str, is_wrong: str, got: object, hint: str) -> AtlasError:
    problem = f"{what[0].upper()}{what[1:]} is {is_wrong}"
    return AtlasError(code, problem, got=got, hint=hint)


def integer(value: Any, what: str) -> int:
    """`value` as an int that fits in 64 bits.

    >>> import numpy as np
    >>> integer(np.int32(7), "a size")
    7
    """
    if type(value) is int and -INT64_MAX <= value <= INT64_MAX:
        return value  # nearly all are
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None:
        got = f"{value!r} ({type(value).__name__})"
        hint = "Pass an int; use // instead of / when computing it"
        raise _refusal(Code.NOT_AN_INTEGER, what, "not a whole number", got, hint)
    if abs(number) > INT64_MAX:
        hint = "Check the sizes that were multiplied to get it"
        raise _refusal(Code.OVERFLOW, what, "past 2**63", number, hint)
    return number


def positive(value: Any, what: str) -> int:
    """`value` as an int of at least 1."""
    number = integer(value, what)
    if number < 1:
        hint = "Leave out what is empty instead of giving it size 0"
        raise _refusal(Code.BAD_SIZE, what, "less than 1", number, hint)
    return number


def natural(value: Any, what: str) -> int:
    """`value` as an int of at least 0."""
    number = integer(value, what)
    if number < 0:
        hint = "Memory is walked upwards here: reverse the view instead"
        raise _refusal(Code.NEGATIVE, what, "negative", number, hint)
    return number


def duration(seconds: Any, most: float = MOST_SECONDS) -> float:
    """A number of seconds; none at all where less than none is left.

    What is no number is refused, since a deadline that is none never passes.

    >>> duration(30), duration(-0.5)
    (30.0, 0.0)
    >>> duration(float("nan"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: This is no number of seconds from 0 to 86,400. Got nan...
    """
    number = isinstance(seconds, Real) and not isinstance(seconds, bool)
    if not number or not seconds <= most:
        problem = f"This is no number of seconds from 0 to {most:,}"
        hint = "Pass a number, and ask again for what takes longer"
        raise AtlasError(Code.BAD_QUANTITY, problem, got=repr(seconds)[:100], hint=hint)
    return max(0.0, float(seconds))
