"""What a plan is asked for, checked and filled in."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import positive
from kvatlas.models import Model
from kvatlas.planning.backends import Backend

_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {f"{unit}I": 2 ** (10 * power) for power, unit in enumerate("KMGT", start=1)}
_QUANTITY = re.compile(r"\s*(\d{1,18})(?:\.(\d{1,9}))?\s*([KMGT]?I?)(B?)\s*", re.IGNORECASE)


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
    states: Literal["auto", "shared", "apart"]


def quantity(value: int | str, what: str = "the memory") -> int:
    """Bytes from a number or a text such as 60GiB or 80GB.

    >>> quantity("60GiB"), quantity("80GB"), quantity(1024)
    (64424509440, 80000000000, 1024)
    """
    return positive(_parse(value, what, {**_DECIMAL, **_BINARY}), what)


def length(value: int | str) -> int:
    """Tokens from a number or a text: 32k is 32,000, and 32K or 32Ki 32,768, as engines read them.

    >>> length("32k"), length("32K"), length("1.5k"), length(4096)
    (32000, 32768, 1500, 4096)
    """
    units = {unit.lower(): size for unit, size in _DECIMAL.items()}
    for unit, size in _BINARY.items():
        units |= {unit[0]: size, unit.capitalize(): size}
    return positive(_parse(value, "the length", units, cased=True), "the length")


def _parse(value: int | str, what: str, units: dict[str, int], *, cased: bool = False) -> int:
    if not isinstance(value, str):
        return value
    found = _QUANTITY.fullmatch(value)
    unit = found[3] if found and cased else found[3].upper() if found else None
    if found is None or unit not in units or (cased and found[4]):
        raise AtlasError(
            Code.BAD_QUANTITY,
            f"{what[0].upper()}{what[1:]} is a number with an optional unit",
            got=repr(value[:60]),
            hint="Write 32k or 32768" if cased else "Write 60GiB, 80GB or plain bytes",
        )
    size, part = units[unit], str(found[2] or "0")
    return int(found[1]) * size + int(part) * size // int(10 ** len(part))
