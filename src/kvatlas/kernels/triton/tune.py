"""Launch parameters: measured for a chip and kept in a file, or a sane default.

`choices.json` has, for each family of chips and each kernel, a list of rules. The first
rule whose `when` agrees with the facts of a launch gives its parameters: a number there
is the most that a fact may be, anything else must be equal.
"""

from __future__ import annotations

import json
import math
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from triton.runtime import driver

Facts = dict[str, Any]
Choice = dict[str, Any]

SHIPPED = Path(__file__).with_name("choices.json")


@lru_cache(maxsize=1)
def _rules() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The shipped rules, with those of `KVATLAS_TUNE` before them."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = json.loads(SHIPPED.read_text())
    own = os.environ.get("KVATLAS_TUNE")
    if own and Path(own).exists():
        for family, kernels in json.loads(Path(own).read_text()).items():
            for kernel, rules in kernels.items():
                known = found.setdefault(family, {}).setdefault(kernel, [])
                known[:0] = rules
    return found


@lru_cache(maxsize=16)
def family(device: torch.device) -> str:
    """The family of chips that a device belongs to: `hopper`, or `any`.

    >>> family(torch.device("cpu"))
    'any'
    """
    if device.type == "cuda" and torch.version.cuda:
        return {9: "hopper"}.get(capability(device)[0], "any")
    return "any"


@lru_cache(maxsize=16)
def capability(device: torch.device) -> tuple[int, int]:
    """What an NVIDIA chip can do."""
    return torch.cuda.get_device_capability(device)


@lru_cache(maxsize=16)
def processors(device: torch.device) -> int:
    """Multiprocessors of a device; a few where a CPU plays one."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 4


@lru_cache(maxsize=16)
def shared_memory(device: torch.device) -> float:
    """Bytes that a program may hold on the chip; where a CPU plays one, any number."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])
    return math.inf


def choose(kernel: str, device: torch.device, **facts: Any) -> Choice:
    """Parameters of a launch.

    >>> choose("copy", torch.device("cpu"))["tile"] > 0
    True
    """
    return dict(_choose(kernel, family(device), tuple(sorted(facts.items()))))


@lru_cache(maxsize=1024)
def _choose(kernel: str, chips: str, facts: tuple[tuple[str, Any], ...]) -> Choice:
    known = _rules()
    found: Choice = {}
    for name in (chips, "any"):
        for rule in known.get(name, {}).get(kernel, []):
            if _agrees(rule.get("when", {}), dict(facts)):
                found = {**rule["use"], **found}
                break
    return found


def _agrees(when: Facts, facts: Facts) -> bool:
    """Whether facts are within a rule.

    >>> _agrees({"dim": 128, "cache": "fp8"}, {"dim": 64, "cache": "fp8"})
    True
    >>> _agrees({"dim": 128}, {"dim": 256}), _agrees({"cache": "fp8"}, {"cache": "auto"})
    (False, False)
    """
    for name, bound in when.items():
        fact = facts.get(name)
        if isinstance(bound, int) and not isinstance(bound, bool):
            if fact is None or fact > bound:
                return False
        elif fact != bound:
            return False
    return True


def remember(path: Path, chips: str, kernel: str, when: Facts, use: Choice) -> None:
    """Put a measured choice into a file of rules, before those that it has."""
    rules = json.loads(path.read_text()) if path.exists() else {}
    mine = rules.setdefault(chips, {}).setdefault(kernel, [])
    mine[:] = [{"when": when, "use": use}, *(rule for rule in mine if rule["when"] != when)]
    path.write_text(json.dumps(rules, indent=2) + "\n")
    _rules.cache_clear()
    _choose.cache_clear()
