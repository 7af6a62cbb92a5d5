"""`PlanRequest`, the arguments of a plan, and parsers for sizes such as 60GiB and 32k."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import integer, positive
from kvatlas.models import Model
from kvatlas.planning.backends import Backend
from kvatlas.planning.engine_rules import NEWEST, EngineRules, PrefillCheckpoint
from kvatlas.specs import Spec

_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {f"{unit}I": 2 ** (10 * power) for power, unit in enumerate("KMGT", start=1)}
_QUANTITY = r"(?i)\s*(\d{1,18})(?:\.(\d{1,9}))?\s*([KMGT]?I?)(B?)\s*"


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The validated arguments of `plan()`, with defaults filled in: the input of a policy."""

    model: Model
    backends: dict[str, Backend | None]
    """The backend of each layer; None for recurrent layers."""
    memory: int
    max_len: int
    stages: dict[str, int] = {}
    """The pipeline stage of each layer."""
    tp: int = 1
    pp: int = 1
    dcp: int = 1
    layout: str | None = None
    block_size: int | None = None
    pack: int | Literal["auto"] = "auto"
    in_flight: int = 0
    prefix_caching: bool = True
    requests: int | None = None
    states: Literal["auto", "shared", "apart"] = "auto"
    policy: str = "atlas"
    """The policy as the caller named it, such as `vllm@0.32`."""
    rules: EngineRules = NEWEST
    """The rules of the release of vLLM."""
    chip: str | None = None
    checkpoints: dict[Spec, PrefillCheckpoint] = {}
    """The rule for each recurrent spec whose states are saved in the middle of a prefill."""
    runs_on: str | None = None
    """The engine that must be able to run the plan, such as `vllm@0.32`; None for any plan."""


def quantity(value: int | str, what: str = "the memory") -> int:
    """Return a number of bytes, given as a number or as a string such as 60GiB or 80GB.

    >>> quantity("60GiB"), quantity("80GB"), quantity(1024)
    (64424509440, 80000000000, 1024)
    """
    return integer(_parse(value, {**_DECIMAL, **_BINARY}), what)


def length(value: int | str) -> int:
    """Return a number of tokens, given as a number or as a string such as 32k.

    As in engines, 32k is 32,000 and 32K is 32,768.

    >>> length("32k"), length("32K"), length("1.5k"), length(4096)
    (32000, 32768, 1500, 4096)
    """
    units = {unit.lower(): size for unit, size in _DECIMAL.items()}
    for unit, size in _BINARY.items():
        units |= {unit[0]: size, unit.capitalize(): size}
    tokens = _parse(value, units, cased=True)
    if isinstance(tokens, int) and tokens < 1:
        problem, hint = "A length must be at least one token", "Write 32k or 32768"
        raise AtlasError(Code.BAD_SIZE, problem, got=repr(value), hint=hint)
    return positive(tokens, "the length")


def _parse(value: int | str, units: dict[str, int], *, cased: bool = False) -> int:
    if not isinstance(value, str):
        return value
    match = re.fullmatch(_QUANTITY, value)
    unit = match[3] if match and cased else match[3].upper() if match else None
    if match is None or unit not in units or (cased and match[4]):
        raise AtlasError(
            Code.BAD_QUANTITY,
            got=repr(value[:60]),
            hint="Write 32k or 32768" if cased else "Write 60GiB, 80GB or plain bytes",
        )
    size, decimals = units[unit], str(match[2] or "0")
    return int(match[1]) * size + int(decimals) * size // int(10 ** len(decimals))
