"""The house itself: imports go down and are light, files stay short, docs are examples."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import kvatlas.geometry
import kvatlas.specs

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "kvatlas"
ROOMS = (
    "errors", "geometry", "specs", "models", "planning", "cache", "kernels", "pool", "simulate",
    "routing", "copying", "wire", "tier", "maps", "engines", "cli",
)  # fmt: skip
"""From the ground up: a room imports only rooms below it."""
CORE = {"numpy", "msgspec", "kvatlas"}
PACKAGES = {path.parent for path in SOURCE.rglob("__init__.py")}
FILES = sorted(SOURCE.rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.fixture(scope="module", autouse=True)
def _forget_parsed() -> Iterator[None]:
    """Free the syntax trees: with so many objects, garbage collection slows later tests down."""
    yield
    parsed.cache_clear()


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}
FRONT_DOOR = "kvatlas"
ENGINES = {module_of(path) for path in (SOURCE / "engines").glob("*/__init__.py")}
"""Each is a package with a face of its own, imported only when it is used."""


INTERNAL: dict[str, str] = {
    "specs": """
        geometry.integers geometry.packing
    """,
    "models": """
        geometry.byte_sizes geometry.integers
    """,
    "planning": """
        geometry.byte_sizes geometry.integers geometry.runs geometry.validation
        specs.cell_formats specs.scale_location
    """,
    "cache": """
        geometry.byte_sizes planning.plans
    """,
    "kernels": """
        cache.tensors geometry.address_arrays geometry.combine geometry.integers
        specs.cell_content specs.cell_formats
    """,
    "pool": """
        geometry.address_arrays geometry.integers planning.plans
    """,
    "simulate": """
        geometry.integers planning.sized_layers pool.block_ids pool.checkpoint_share
        pool.checkpoints pool.event_recording pool.events pool.eviction
        pool.group_needs
    """,
    "routing": """
        geometry.address_arrays geometry.block_images geometry.combine geometry.integers
        geometry.state_spans
        geometry.strided_runs planning.plans planning.sized_layers specs.cell_formats
        specs.identity
    """,
    "copying": """
        geometry.address_arrays geometry.integers geometry.nested_steps kernels.cast_scales
        kernels.cell_conversion kernels.triton.launch_runs routing.binding routing.block_tables
        routing.converted_stream routing.run_grids specs.cell_formats
    """,
    "wire": """
        copying.cuda_driver copying.device_marks copying.device_queue
        copying.gather_scatter copying.memory copying.memory_copy copying.movers
        copying.pool_bounds copying.read_coalescing copying.run_bounds copying.stream_pieces
        geometry.address_arrays geometry.integers planning.plans routing.binding
        routing.block_tables routing.conversion routing.request_shape routing.run_grids
        routing.token_ranges specs.cell_formats
    """,
    "tier": """
        geometry.address_arrays geometry.integers planning.plans planning.request
        planning.sized_layers planning.topology routing.binding routing.block_tables
        routing.conversion routing.converted_stream routing.token_ranges
        specs.identity
        copying.block_staging copying.checksum copying.cuda_driver copying.file_runs
        copying.gpu_offload copying.memory_copy copying.nested_copy copying.pool_bounds
        copying.run_bounds copying.stream_pieces wire.channels wire.connection wire.encoding
        wire.handshake_checks wire.protocol wire.rpc wire.shared_pools
        wire.unix_sockets pool.checkpoints
    """,
    "maps": """
        geometry.address_arrays geometry.byte_sizes planning.plans
    """,
    "engines": """
        geometry.allocations geometry.integers models.row_identity planning.engine_rules
        planning.policy_atlas planning.request
        routing.conversion specs.cell_formats specs.scale_location tier.chained_keys
        tier.addresses tier.any_tier tier.converting tier.file_owner tier.hit tier.opening
        tier.prefix_finder tier.store_hit tier.stored_positions tier.stores.base tier.tier_events
        wire.channels
        wire.client.kept_offers
        wire.client.transfer_request wire.connection wire.protocol wire.transports.nixl_agents
        copying.cuda_driver copying.device_marks copying.memory_copy
    """,
    "cli": """
        geometry.byte_sizes geometry.integers models.weights.formats planning.backends
        planning.engine_rules planning.plan_data planning.planner
        planning.plans planning.request planning.sized_layers tier.store_inspection
        copying.run_bounds
        wire.sample_server
    """,
}
"""Modules that a package may import past their package's `__init__`.

Public lists contain what users need. A helper that only other packages need is imported from its
module, and the module is listed here, under the package that imports it.
"""


@cache
def imports(path: Path) -> frozenset[str]:
    """Modules that a file imports; `from package import module` counts as the module."""
    modules = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            package = node.module or ""
            inside = {f"{package}.{alias.name}" for alias in node.names}
            modules |= inside & MODULES.keys()
            if not inside <= MODULES.keys():
                modules.add(package)
        elif isinstance(node, ast.Call) and called(node).endswith("import_module"):
            modules |= imported_by_name(node.args[0])
    return frozenset(modules)


def called(node: ast.Call) -> str:
    """The last part of the name of the function that is called."""
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))


def imported_by_name(argument: ast.expr) -> set[str]:
    """Modules that `import_module(argument)` may load; `{...}` in an f-string is one name."""
    if isinstance(argument, ast.Constant):
        return {str(argument.value)}
    assert isinstance(argument, ast.JoinedStr), ast.unparse(argument)
    pattern = "".join(
        re.escape(str(part.value)) if isinstance(part, ast.Constant) else r"\w+"
        for part in argument.values
    )
    return {module for module in MODULES if re.fullmatch(pattern, module)}


def loads(module: str) -> set[str]:
    """Modules of kvatlas that an import of `module` loads directly.

    Importing `a.b.c` runs `a/__init__` and `a/b/__init__` first. A file inside `a.b` needs no
    more of `a.b` than has already run.
    """
    names = set()
    for name in imports(MODULES[module]) & MODULES.keys() - {FRONT_DOOR, module}:
        parts = name.split(".")
        packages = {".".join(parts[:end]) for end in range(2, len(parts))}
        names |= {name} | {one for one in packages if not f"{module}.".startswith(f"{one}.")}
    return names


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def crossings(module: str) -> set[str]:
    """Modules of other packages that a file imports past their `__init__`."""
    room = room_of(module)
    public = {f"kvatlas.{one}" for one in ROOMS} | (
        ENGINES if room in ("cli", "engines") else set()
    )
    return {
        name
        for name in imports(MODULES[module])
        if name.startswith("kvatlas.") and room_of(name) != room and name not in public
    }


PACKAGE_FILES = sorted(module for module in MODULES if room_of(module) not in ("", "__main__"))


def test_every_module_is_in_a_room() -> None:
    assert {room_of(module) for module in PACKAGE_FILES} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_package_imports_only_packages_below_it(room: str) -> None:
    imported = [
        (module, name)
        for module in PACKAGE_FILES
        if room_of(module) == room
        for name in imports(MODULES[module])
    ]
    for module, name in imported:
        top, other = name.split(".")[0], room_of(name)
        if top == "kvatlas" and other not in ("", room):
            assert ROOMS.index(other) < ROOMS.index(room), f"{module} imports {name} from above"
        if room in ("errors", "geometry", "specs"):
            assert top in CORE or top in sys.stdlib_module_names, f"{module} imports {name}"
        if room == "geometry":
            assert top != "msgspec"


@pytest.mark.parametrize("room", ROOMS)
def test_a_package_imports_public_names_or_modules_that_are_allowed_by_name(room: str) -> None:
    used = {
        name.removeprefix("kvatlas.")
        for module in PACKAGE_FILES
        if room_of(module) == room
        for name in crossings(module)
    }
    allowed = set(INTERNAL.get(room, "").split())
    assert sorted(used - allowed) == [], f"{room} imports modules that INTERNAL does not allow"
    assert sorted(allowed - used) == [], f"INTERNAL allows modules that {room} does not import"


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The first circle of a graph, closed, or an empty list."""
    done: set[str] = set()

    def walk(module: str, way: tuple[str, ...]) -> list[str]:
        if module in way:
            return [*way[way.index(module) :], module]
        if module not in done:
            for name in sorted(graph[module]):
                if found := walk(name, (*way, module)):
                    return found
            done.add(module)
        return []

    return next((found for module in sorted(graph) if (found := walk(module, ()))), [])


def test_no_two_modules_import_each_other_in_a_circle() -> None:
    """Imports in functions, by `import_module` and through `__init__` count as well.

    Only the front door, which loads every package by name, is left out.
    """
    found = circle({module: loads(module) for module in set(MODULES) - {FRONT_DOOR}})
    assert found == [], " -> ".join(found)


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"b"}}) == ["b", "d", "b"]


def test_imports_by_name_are_seen() -> None:
    dispatch = loads("kvatlas.kernels.dispatch")
    transports = loads("kvatlas.wire.transports.registry")
    assert "kvatlas.kernels.triton" in dispatch
    assert {"kvatlas.wire.transports.tcp", "kvatlas.wire.transports.nixl"} <= transports


def test_no_two_rooms_have_public_classes_of_one_name() -> None:
    homes: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, set()).add(module)
    assert {name: sorted(places) for name, places in homes.items() if len(places) > 1} == {}


@pytest.mark.parametrize("package", sorted(PACKAGES), ids=lambda p: p.name)
def test_no_module_is_shadowed_by_a_function_of_its_name(package: Path) -> None:
    """`import kvatlas.room.name` gives the module, not a function that the face lists."""
    inside = {path.stem for path in package.iterdir() if path.suffix == ".py" or path in PACKAGES}
    named = set()
    for node in ast.walk(parsed(package / "__init__.py")):
        if isinstance(node, ast.ImportFrom) and node.module != module_of(package / "__init__.py"):
            named |= {alias.asname or alias.name for alias in node.names}
    assert inside & named == set()


@pytest.mark.parametrize("path", sorted((SOURCE / "kernels").rglob("*.py")), ids=lambda p: p.stem)
def test_device_code_is_in_files_that_say_so(path: Path) -> None:
    """What Triton compiles is in `*_device.py`; host code is everywhere else."""
    jitted = [
        node.name
        for node in parsed(path).body
        if isinstance(node, ast.FunctionDef)
        and any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]
    assert bool(jitted) == path.stem.endswith("_device"), jitted


MOST_NAMES = 12


def test_no_signature_has_more_names_than_can_be_read_at_once() -> None:
    """Of kernels all names count, elsewhere those that a call may leave unnamed."""
    long = []
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            given = node.args
            names = len(given.posonlyargs) + len(given.args)
            if names + len(given.kwonlyargs) <= MOST_NAMES:
                continue
            if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                names += len(given.kwonlyargs)
            if names > MOST_NAMES:
                long.append(f"{path.name}: {node.name} has {names}")
    assert long == []


@pytest.mark.parametrize("path", sorted((SOURCE / "geometry").glob("*.py")), ids=lambda p: p.name)
def test_geometry_is_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.parametrize("module", [kvatlas.geometry], ids=lambda m: m.__name__)
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


def test_specs_load_neither_torch_nor_other_optional_packages() -> None:
    heavy = [
        "torch", "triton", "transformers", "vllm", "nixl", "mooncake", "typer", "rich",
        "cryptography",
    ]  # fmt: skip
    loaded = run(
        f"import sys, kvatlas.specs;print([name for name in {heavy!r} if name in sys.modules])"
    )
    assert loaded.strip() == "[]"


def test_planning_loads_no_web_client() -> None:
    """A hub is asked only where a hub id is given."""
    loaded = run("import sys, kvatlas.planning; print('urllib.request' in sys.modules)")
    assert loaded.strip() == "False"


def test_import_takes_under_100_ms_more_than_numpy() -> None:
    """The processor's time, in one of several runs, so that a busy machine does not matter."""
    code = (
        "import numpy, time; start = time.process_time(); import kvatlas;"
        "print(time.process_time() - start)"
    )
    assert any(float(run(code)) < 0.1 for _ in range(5))
