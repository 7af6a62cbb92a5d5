"""Sizes and offsets from outside become plain ints here, or a coded refusal.

Python ints never wrap but the int64 of numpy, torch and every transport does,
so nothing past 2**63 - 1 may enter a value. Floats are refused even where they
are whole: a float that is whole today is 2096.0000001 after the next division.
"""

from __future__ import annotations

from operator import index
from typing import Any

from kvatlas.errors import AtlasError, Code

INT64_MAX = 2**63 - 1


def ceil_div(a: int, b: int) -> int:
    """`a / b` rounded up.

    >>> ceil_div(2134016, 16384)
    131
    """
    return -(-a // b)


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


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:]


def integer(value: Any, what: str) -> int:
    """`value` as an int that fits in 64 bits.

    >>> import numpy as np
    >>> integer(np.int32(7), "a size")
    7
    """
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None:
        raise AtlasError(
            Code.NOT_AN_INTEGER,
            f"{_sentence(what)} is not a whole number",
            got=f"{value!r} ({type(value).__name__})",
            hint="Pass an int; use // instead of / when computing it",
        )
    if abs(number) > INT64_MAX:
        raise AtlasError(
            Code.OVERFLOW,
            f"{_sentence(what)} is past 2**63",
            got=number,
            hint="Check the sizes that were multiplied to get it",
        )
    return number


def positive(value: Any, what: str) -> int:
    """`value` as an int of at least 1."""
    number = integer(value, what)
    if number < 1:
        raise AtlasError(
            Code.BAD_SIZE,
            f"{_sentence(what)} is less than 1",
            got=number,
            hint="Leave out what is empty instead of giving it size 0",
        )
    return number


def natural(value: Any, what: str) -> int:
    """`value` as an int of at least 0."""
    number = integer(value, what)
    if number < 0:
        raise AtlasError(
            Code.NEGATIVE,
            f"{_sentence(what)} is negative",
            got=number,
            hint="Memory is walked upwards here: reverse the view instead",
        )
    return number
