"""The public interface of the stable core, as data that a test compares with a recording.

    python -m tests.golden.core_api > tests/golden/core_api.json

records it anew. The core is what an engine may depend on: the packages from errors to routing. A
changed line in the recording is a changed interface: it needs an entry in the changelog and, after
the first release, a deprecation that lasts one minor release.
"""

from __future__ import annotations

import enum
import inspect
import json
import re
from importlib import import_module
from typing import Any

import msgspec

CORE = ("errors", "geometry", "specs", "models", "planning", "routing")
"""The packages of the core. They import numpy and msgspec, and no other package."""
_SHORT = (bool, int, float, str, tuple, type(None))
_REFERENCE = re.compile(r"ForwardRef\(([^)]*)\)")


def public_names(package: str) -> list[str]:
    module = import_module(f"kvatlas.{package}")
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    return sorted(name for name, value in vars(module).items() if _made_in(value, module.__name__))


def public_interface() -> dict[str, dict[str, Any]]:
    """The signatures of all public functions, and the fields and methods of all public classes."""
    return {
        package: {
            name: _described(getattr(import_module(f"kvatlas.{package}"), name))
            for name in public_names(package)
        }
        for package in CORE
    }


def _made_in(value: Any, module: str) -> bool:
    return inspect.isclass(value) and value.__module__ == module


def _described(value: Any) -> Any:
    if not inspect.isclass(value):
        return _signature(value) if callable(value) else type(value).__name__
    if issubclass(value, enum.Enum):
        return {"members": sorted(member.name for member in value)}
    made: dict[str, Any] = {"members": _members(value)}
    if issubclass(value, msgspec.Struct):
        made["json"] = sorted(field.encode_name for field in msgspec.structs.fields(value))
    made["constructor"] = _signature(value)
    return made


def _members(kind: type) -> dict[str, str]:
    """The public attributes of a class: signatures of methods, `property` for all others."""
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        if owner.__module__.startswith("kvatlas"):
            found |= {name: _member(value) for name, value in vars(owner).items() if name[0] != "_"}
    return dict(sorted(found.items()))


def _member(value: Any) -> str:
    wrapped = getattr(value, "__func__", value)
    if inspect.isfunction(wrapped):
        return _signature(wrapped)
    getter = getattr(value, "fget", None) or getattr(value, "func", None)
    return f"property -> {inspect.signature(getter).return_annotation}" if getter else "attribute"


def _signature(value: Any) -> str:
    """The signature, without defaults that are long and quotes that depend on Python's version."""
    signature = inspect.signature(value)
    parameters = [
        one
        if one.default is one.empty or isinstance(one.default, _SHORT)
        else one.replace(default=...)
        for one in signature.parameters.values()
    ]
    text = str(signature.replace(parameters=parameters)).replace("'", "")
    return _REFERENCE.sub(r"\1", text)


if __name__ == "__main__":
    print(json.dumps(public_interface(), indent=1, sort_keys=True))
