"""`import kvatlas`: names and packages are attributes, loaded on first use."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvatlas

SOURCE = Path(kvatlas.__file__).parent
PACKAGES = sorted(
    {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    | {path.stem for path in SOURCE.glob("*.py") if not path.stem.startswith("__")}
)
OTHER_WORDS = re.compile(r"(\w+_)?(src|dst)(_\w+)?|near|far|mine|theirs|(\w+_)?(seconds|patience)")
"""Words for which parameters have another: source, destination, own, peer, timeout."""
HEAVY = ("numpy", "msgspec", "torch", "triton", "transformers", "vllm", "typer", "rich", "zmq")


def in_new_process(code: str) -> Any:
    """Run `code`, which prints JSON, in a process that has imported nothing yet."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_is_loaded_by_its_name(package: str) -> None:
    assert kvatlas.__getattr__(package).__name__ == f"kvatlas.{package}"


def test_packages_are_attributes_in_a_new_process() -> None:
    """The lowest first: importing a package sets the attributes of all those below it."""
    names = in_new_process(
        "import json, kvatlas as k; packages = (k.errors, k.specs, k.models, k.planning, k.cli);"
        "print(json.dumps([package.__name__ for package in packages]))"
    )
    assert names == [f"kvatlas.{name}" for name in ("errors", "specs", "models", "planning", "cli")]


def test_dir_lists_public_names_and_packages_only() -> None:
    assert dir(kvatlas) == sorted({*kvatlas.__all__, *PACKAGES})


def test_dir_stays_the_same_after_names_were_used() -> None:
    before, after = in_new_process(
        "import json, kvatlas; before = dir(kvatlas);"
        "[getattr(kvatlas, name) for name in before];"
        "print(json.dumps([before, dir(kvatlas)]))"
    )
    assert before == after


@pytest.mark.parametrize("name", kvatlas.__all__)
def test_each_public_name_resolves(name: str) -> None:
    assert getattr(kvatlas, name) is not None


def test_an_unknown_attribute_is_an_attribute_error_with_its_name() -> None:
    with pytest.raises(AttributeError, match="'kvatlas' has no attribute 'plane'"):
        kvatlas.plane  # noqa: B018


def test_import_loads_no_package_and_no_dependency() -> None:
    loaded = in_new_process("import json, sys, kvatlas; print(json.dumps(sorted(sys.modules)))")
    assert [name for name in loaded if name.startswith("kvatlas.")] == []
    assert [name for name in HEAVY if name in loaded] == []


def test_a_name_loads_its_package_only() -> None:
    loaded = in_new_process(
        "import json, sys, kvatlas; kvatlas.Layout; print(json.dumps(sorted(sys.modules)))"
    )
    packages = {name.split(".")[1] for name in loaded if name.startswith("kvatlas.")}
    assert packages == {"errors", "geometry"}


def public_callables(package: str) -> Iterator[tuple[str, Any]]:
    """Yield (name, function) for the public functions, classes and methods of a package."""
    found = kvatlas.__getattr__(package)
    for name in getattr(found, "__all__", ()):
        made = getattr(found, name)
        yield name, made
        if inspect.isclass(made):
            methods = [method for method in dir(made) if not method.startswith("_")]
            yield from ((f"{name}.{method}", getattr(made, method)) for method in methods)


@pytest.mark.parametrize("package", PACKAGES)
def test_parameters_have_one_word_for_each_end_and_for_durations(package: str) -> None:
    unusual = []
    for name, made in public_callables(package):
        try:
            parameters = inspect.signature(made).parameters
        except (TypeError, ValueError):  # a value, or a class without a signature
            continue
        unusual += [f"{name}({one}=)" for one in parameters if OTHER_WORDS.fullmatch(one)]
    assert unusual == []
