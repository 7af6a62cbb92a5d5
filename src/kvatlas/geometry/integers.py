"""Validation of sizes, offsets and durations: each function returns a number or raises an error.

Python ints never wrap around, but the int64 of numpy, torch and every transport does, so
nothing above 2**63 - 1 may enter a value. Floats are rejected even if they are integral:
a float that is integral today is 2096.0000001 after the next division.
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
"""The longest timeout, in seconds: one day."""


Whole = TypeVar("Whole", int, NDArray[np.int64])
"""An int or an int64 array."""


def ceil_div(a: Whole, b: int) -> Whole:
    """Return `a / b` rounded up.

    >>> ceil_div(2134016, 16384)
    131
    """
    return -(-a // b)


def at_most(a: Whole, b: int) -> Whole:
    """Return the smaller of `a` and `b`, elementwise for arrays.

    >>> at_most(7, 5), at_most(np.array([3, 7]), 5).tolist()
    (5, [3, 5])
    """
    return min(a, b) if isinstance(a, int) else np.minimum(a, b)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`.

    >>> round_up(37376, 576)
    37440
    """
    return ceil_div(value, multiple) * multiple


def set_fields(value: object, **fields: Any) -> None:
    """Set fields of a frozen dataclass to their canonical values, from its `__post_init__`."""
    for name, field in fields.items():
        object.__setattr__(value, name, field)


def are_plain(numbers: Sequence[object], least: int) -> bool:
    """Return whether all numbers are ints in least..2**63 - 1 and need no further validation.

    >>> are_plain((4, 0), 0), are_plain((4, 0), 1), are_plain((4.0,), 1), are_plain((True,), 1)
    (True, False, False, False)
    """
    for number in numbers:
        if type(number) is not int or not least <= number <= INT64_MAX:
            return False
    return True


def _refusal(code: Code, what: str, is_wrong: str, got: object, hint: str) -> AtlasError:
    problem = f"{what[0].upper()}{what[1:]} {is_wrong}"
    return AtlasError(code, problem, got=got, hint=hint)


def integer(value: Any, what: str) -> int:
    """Return `value` as an int that fits in 64 bits; otherwise raise an error that names `what`.

    >>> import numpy as np
    >>> integer(np.int32(7), "a size")
    7
    """
    if type(value) is int and -INT64_MAX <= value <= INT64_MAX:
        return value  # fast path: nearly all values are plain ints
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None:
        raise _refusal(
            Code.NOT_AN_INTEGER,
            what,
            "must be an integer",
            f"{value!r} ({type(value).__name__})",
            "Pass an int; use // instead of / when computing it",
        )
    if abs(number) > INT64_MAX:
        raise _refusal(
            Code.OVERFLOW,
            what,
            "must not exceed 2**63 - 1 in magnitude",
            number,
            "Check the sizes that were multiplied to compute it",
        )
    return number


def positive(value: Any, what: str) -> int:
    """Return `value` as an int of at least 1; otherwise raise an error that names `what`."""
    number = integer(value, what)
    if number < 1:
        raise _refusal(Code.BAD_SIZE, what, "must be at least 1", number, "Pass a positive integer")
    return number


def natural(value: Any, what: str) -> int:
    """Return `value` as an int of at least 0; otherwise raise an error that names `what`."""
    number = integer(value, what)
    if number < 0:
        raise _refusal(
            Code.NEGATIVE, what, "must not be negative", number, "Pass 0 or a positive integer"
        )
    return number


def duration(timeout: Any, most: float = MOST_SECONDS) -> float:
    """Return a timeout in seconds as a float; a negative timeout becomes 0.

    Anything but a number up to `most` raises an error. This includes NaN, because a deadline
    of NaN would never pass.

    >>> duration(30), duration(-0.5)
    (30.0, 0.0)
    >>> duration(float("nan"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: A timeout must be a number of at most 86,400 seconds. Got nan...
    """
    number = isinstance(timeout, Real) and not isinstance(timeout, bool)
    if not number or not timeout <= most:
        problem = f"A timeout must be a number of at most {most:,} seconds"
        hint = "Pass a number of seconds; call again to wait longer"
        raise AtlasError(Code.BAD_QUANTITY, problem, got=repr(timeout)[:100], hint=hint)
    return max(0.0, float(timeout))
