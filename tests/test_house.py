"""The house itself: imports go down and are light, files stay short, docs are examples."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import kvatlas.geometry
import kvatlas.specs

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "kvatlas"
ROOMS = (
    "errors", "geometry", "specs", "models", "plan", "cache", "kernels", "route", "wire", "pool",
    "engines", "cli",
)  # fmt: skip
CORE = {"numpy", "msgspec", "kvatlas"}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize(
    "path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE))
)
def test_a_room_imports_only_rooms_below_it(path: Path) -> None:
    room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if room == "__init__":
        return
    floor = ROOMS.index(room)
    for name in imports(path):
        top, _, rest = name.partition(".")
        if top == "kvatlas" and rest:
            assert ROOMS.index(rest.split(".")[0]) <= floor, f"{path} imports {name} from above"
        if room in ("errors", "geometry", "specs"):
            assert top in CORE or top in sys.stdlib_module_names, f"{path} imports {name}"
        if room == "geometry":
            assert top != "msgspec"


@pytest.mark.parametrize("path", sorted((SOURCE / "geometry").glob("*.py")), ids=lambda p: p.name)
def test_geometry_is_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.parametrize("module", [kvatlas, kvatlas.geometry], ids=lambda m: m.__name__)
def test_public_classes_have_examples(module: ModuleType) -> None:
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value):
            docs = inspect.getdoc(value) or ""
            methods = " ".join(inspect.getdoc(m) or "" for m in vars(value).values() if callable(m))
            assert ">>>" in docs + methods, f"{name} has no example"


def test_the_core_depends_on_numpy_and_msgspec_only() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(r"^dependencies = \[(.*)\]$", text, re.MULTILINE)
    assert found
    assert {re.split(r"[><=]", name)[0] for name in re.findall(r'"([^"]+)"', found[1])} == {
        "numpy",
        "msgspec",
    }


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


def test_import_is_light_and_brings_no_torch() -> None:
    heavy = ("torch", "triton", "transformers", "vllm", "nixl", "mooncake", "typer", "rich", "zmq")
    loaded = run(
        "import sys, kvatlas, kvatlas.specs;"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    assert loaded.strip() == "[]"


def test_import_takes_under_100_ms_more_than_numpy() -> None:
    """The processor's time, the best of several runs, so that a busy machine does not matter."""
    code = (
        "import numpy, time; start = time.process_time(); import kvatlas;"
        "print(time.process_time() - start)"
    )
    assert min(float(run(code)) for _ in range(5)) < 0.1
