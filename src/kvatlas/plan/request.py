"""What a plan is asked for, checked and filled in."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import positive
from kvatlas.models.model import Model
from kvatlas.plan.backends import Backend

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}I": 2 ** (10 * power) for power, unit in enumerate("KMGT", start=1)}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", re.IGNORECASE)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan was asked for, checked and filled in: what policies work from."""

    model: Model
    backends: dict[str, Backend | None]
    stages: dict[str, int]
    memory: int
    tp: int
    pp: int
    dcp: int
    layout: str | None
    block_size: int | None
    pack: int | Literal["auto"]
    max_len: int
    in_flight: int
    prefix_caching: bool
    requests: int | None


def quantity(value: int | str, what: str = "memory") -> int:
    """Bytes or tokens from a number or a text such as 60GiB, 80GB or 32k.

    >>> quantity("60GiB"), quantity("80GB"), quantity("1.5k")
    (64424509440, 80000000000, 1500)
    """
    if isinstance(value, str):
        found = _QUANTITY.fullmatch(value)
        if not found:
            raise AtlasError(
                Code.BAD_QUANTITY,
                f"{what.capitalize()} is a number with an optional unit",
                got=repr(value),
                hint="Write 60GiB, 80GB, 32k or a plain number",
            )
        number, unit = found.groups()
        exact = float(number) * _UNITS[unit.upper()] if "." in number else None
        value = int(exact) if exact is not None else int(number) * _UNITS[unit.upper()]
    return positive(value, what)
