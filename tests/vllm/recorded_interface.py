"""The interface of a vLLM release, next to the one that was recorded when we decided about it.

`tests/vllm/interfaces` has a file for each release: what the connector does in every method of
vLLM's base class, whether the specs of a class are read or refused, and the fields of each class.

    python -m tests.vllm.recorded_interface tests/vllm/interfaces/0.34.json

records the release that is installed. What no earlier release had is `undecided`, which fails the
tests until somebody decides, and writes the decision into the file.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).parent / "interfaces"
UNDECIDED, OVERRIDDEN, READ, REFUSED = "undecided", "overridden", "read", "refused"

Interface = dict[str, Any]


def methods_of(classes: Iterable[type]) -> list[str]:
    """The public methods and properties of vLLM's base classes."""
    found = {name for one in classes for name in vars(one) if not name.startswith("_")}
    return sorted(found)


def classes_of(module: ModuleType) -> dict[str, list[str]]:
    """The data classes of vLLM's module of specs, with the fields that each declares."""
    found = {}
    for name, one in vars(module).items():
        if inspect.isclass(one) and one.__module__ == module.__name__ and is_dataclass(one):
            every = {field.name for field in fields(one)}
            found[name] = [field for field in inspect.get_annotations(one) if field in every]
    return found


def interface_of(bases: Iterable[type], module: ModuleType) -> Interface:
    """The interface of the vLLM that is imported, without any decision."""
    modes = list(module.KVQuantMode.__members__)
    return {"methods": methods_of(bases), "classes": classes_of(module), "modes": modes}


def recorded(release: str) -> Interface | None:
    """The recorded interface of a release such as 0.33; None if there is none."""
    path = FOLDER / f"{release}.json"
    if not path.exists():
        return None
    found: Interface = json.loads(path.read_text())
    return found


def differences(release: str, found: Interface) -> list[str]:
    """A sentence for everything that differs from the record of a release, or is undecided.

    A release without a record is compared with the last one that has one.
    """
    known, against = recorded(release), release
    told = []
    if known is None:
        against = max((path.stem for path in FOLDER.glob("*.json")), key=_numbers)
        known = recorded(against)
        told = [f"vLLM {release} has no recorded interface; it was compared with {against}"]
    assert known is not None
    told += _unlike("method", release, known["methods"], found["methods"])
    told += _unlike("class", release, known["classes"], found["classes"])
    told += _unlike("cache mode", release, known["modes"], found["modes"])
    for name in known["classes"].keys() & found["classes"].keys():
        own = known["classes"][name]["fields"]
        told += _unlike(f"field of {name}:", release, own, found["classes"][name])
    undecided = [name for name, what in known["methods"].items() if what == UNDECIDED]
    undecided += [name for name, one in known["classes"].items() if one["decision"] == UNDECIDED]
    return told + [f"{name} is {UNDECIDED} in interfaces/{against}.json" for name in undecided]


def _unlike(what: str, release: str, known: Iterable[str], found: Iterable[str]) -> list[str]:
    new, missing = set(found) - set(known), set(known) - set(found)
    decide = "decide what the connector does with it, and record the decision"
    return [
        *(f"new {what} {name} in vLLM {release}: {decide}" for name in sorted(new)),
        *(f"missing {what} {name} in vLLM {release}: {decide}" for name in sorted(missing)),
    ]


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def bases() -> list[type]:
    """The classes that the connector derives from."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    return [KVConnectorBase_V1, SupportsHMA]


def main() -> None:
    from vllm.v1 import kv_cache_interface

    found = interface_of(bases(), kv_cache_interface)
    known: Interface = {"methods": {}, "classes": {}}
    for path in sorted(FOLDER.glob("*.json"), key=lambda path: _numbers(path.stem)):
        earlier = json.loads(path.read_text())
        for kind in known:
            known[kind] |= earlier[kind]
    made = {
        "methods": {name: known["methods"].get(name, UNDECIDED) for name in found["methods"]},
        "classes": {
            name: {
                "decision": known["classes"].get(name, {}).get("decision", UNDECIDED),
                "fields": declared,
            }
            for name, declared in found["classes"].items()
        },
        "modes": found["modes"],
    }
    Path(sys.argv[1]).write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
