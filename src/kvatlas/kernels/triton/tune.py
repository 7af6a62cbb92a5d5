"""Launch parameters: measured on some GPU architectures, and defaults for the others.

`tuned_launches.json` contains a list of rules for each architecture and kernel. The facts of a
launch are its named properties, such as the head size and the cache dtype. The first rule whose
`when` matches the facts supplies the launch parameters. A number in `when` is an upper bound of the
fact of the same name; any other value must equal the fact.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from triton.runtime import driver

from kvatlas.errors import AtlasError, Code

Facts = dict[str, Any]
Choice = dict[str, Any]


class LaunchRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters (`use`) for launches whose facts (named properties) match `when`."""

    use: Choice
    when: Facts = {}


Rules = dict[str, dict[str, list[LaunchRule]]]
"""Rules by GPU architecture and kernel."""

_HERE: AbstractContextManager[Any] = nullcontext()

SHIPPED = Path(__file__).with_name("tuned_launches.json")


@lru_cache(maxsize=1)
def _rules() -> Rules:
    """Return the shipped rules, preceded by the rules of the file that `KVATLAS_TUNE` names."""
    rules = _read(SHIPPED)
    own = os.environ.get("KVATLAS_TUNE")
    if own and Path(own).exists():
        for chip, kernels in _read(Path(own)).items():
            for kernel, first in kernels.items():
                rules.setdefault(chip, {}).setdefault(kernel, [])[:0] = first
    return rules


def _read(path: Path) -> Rules:
    """Return the rules in a file; raise an error if it cannot be read or decoded."""
    try:
        if not path.is_file():
            raise ValueError("this path is not a regular file")
        return msgspec.json.decode(path.read_bytes(), type=Rules)
    except (OSError, ValueError) as problem:
        raise AtlasError(
            Code.UNREADABLE,
            "The file of launch parameters cannot be read, or contains no valid rules",
            got=f"{path}: {problem}",
            hint="Measure the parameters again, or unset KVATLAS_TUNE",
        ) from problem


@lru_cache(maxsize=16)
def architecture(device: torch.device) -> str:
    """Return the architecture whose rules apply to a device: `hopper` or `any`.

    >>> architecture(torch.device("cpu"))
    'any'
    """
    if device.type == "cuda" and torch.version.cuda:
        return {9: "hopper"}.get(capability(device)[0], "any")
    return "any"


@lru_cache(maxsize=16)
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of an NVIDIA GPU."""
    return torch.cuda.get_device_capability(device)


@lru_cache(maxsize=16)
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device; 4 for a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 4


@lru_cache(maxsize=16)
def shared_memory(device: torch.device) -> float:
    """Return the maximum shared memory per program, in bytes; infinity for a CPU."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])
    return math.inf


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which `device` is current: Triton launches on the current device."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return _HERE
    return torch.cuda.device(device)


@lru_cache(maxsize=16)
def dependent_launch(device: torch.device) -> dict[str, Any]:
    """Return the launch options of a kernel that may start before the previous one has ended.

    GPUs without this feature launch the kernel as usual (see `dependent_launch_device`).

    >>> dependent_launch(torch.device("cpu"))
    {'EARLY': False}
    """
    if device.type == "cuda" and torch.version.hip is None and capability(device)[0] >= 9:
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


def choose(kernel: str, device: torch.device, **facts: Any) -> Choice:
    """Return launch parameters from the first rule that matches `facts`, properties of the launch.

    >>> choose("copy", torch.device("cpu"))["tile"] > 0
    True
    """
    return dict(_choose(kernel, architecture(device), tuple(sorted(facts.items()))))


@lru_cache(maxsize=1024)
def _choose(kernel: str, chip: str, facts: tuple[tuple[str, Any], ...]) -> Choice:
    choice: Choice = {}
    for name in (chip, "any"):
        for rule in _rules().get(name, {}).get(kernel, []):
            if _agrees(rule.when, dict(facts)):
                choice = {**rule.use, **choice}
                break
    return choice


def _agrees(when: Facts, facts: Facts) -> bool:
    """Return whether the facts of a launch match the condition `when` of a rule.

    >>> _agrees({"dim": 128, "cache": "fp8"}, {"dim": 64, "cache": "fp8"})
    True
    >>> _agrees({"dim": 128}, {"dim": 256}), _agrees({"cache": "fp8"}, {"cache": "auto"})
    (False, False)
    """
    for name, bound in when.items():
        fact = facts.get(name)
        if isinstance(bound, int) and not isinstance(bound, bool):
            if not isinstance(fact, int) or fact > bound:
                return False
        elif fact != bound:
            return False
    return True


def remember(path: Path, chip: str, kernel: str, when: Facts, use: Choice) -> None:
    """Insert a rule with measured parameters into a file, before the existing rules."""
    rules = _read(path) if path.exists() else {}
    mine = rules.setdefault(chip, {}).setdefault(kernel, [])
    mine[:] = [LaunchRule(use, when), *(rule for rule in mine if rule.when != when)]
    path.write_text(json.dumps(msgspec.to_builtins(rules), indent=2) + "\n")
    _rules.cache_clear()
    _choose.cache_clear()
