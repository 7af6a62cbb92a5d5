"""The pages of the site that are not in docs/: the README as its home, and the API.

Every package of kvatlas that names what it offers (`__all__`) has a page; so a new room
has one without a line here.
"""

from __future__ import annotations

import ast
from pathlib import Path

import mkdocs_gen_files

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
REPOSITORY = "https://github.com/kvatlas/kvatlas"
SHOWN = "{show_root_heading: true, show_root_toc_entry: true}"
COPIES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Pages that stand in the root of the repository, and their names on the site."""


def linked(text: str) -> str:
    """Links to pages of the site lead there instead of to the repository."""
    text = text.replace(f"{REPOSITORY}/blob/main/docs/", "")
    for page, name in COPIES.items():
        text = text.replace(f"{REPOSITORY}/blob/main/{page}", name)
    return text


def source(module: str) -> Path | None:
    """The file of a module or package of kvatlas; None where there is none of that name."""
    path = SOURCE.joinpath(*module.split("."))
    files = (path / "__init__.py", path.with_suffix(".py"))
    return next((file for file in files if file.exists()), None)


def offered(init: Path) -> list[str] | None:
    """The names that a package says are public; None where it says none."""
    for node in ast.parse(init.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return None


def definition(module: str, name: str) -> str:
    """Where a name is defined that a module has, perhaps from another.

    Followed here because a function may have the name of a module beside it, which
    mkdocstrings would then take for it.
    """
    file = source(module)
    for node in ast.walk(ast.parse(file.read_text())) if file else ():
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kvatlas"):
            for alias in node.names:
                if (alias.asname or alias.name) != name:
                    continue
                if node.module == module:  # one of its own modules
                    return f"{module}.{name}"
                return definition(node.module, alias.name)
    return f"{module}.{name}"


for page, name in COPIES.items():
    with mkdocs_gen_files.open(name, "w") as file:
        file.write(linked((ROOT / page).read_text()))
    mkdocs_gen_files.set_edit_path(name, f"../{page}")

with mkdocs_gen_files.open("api/index.md", "w") as index:
    index.write("# API\n\nWhat each package offers; everything else may change.\n\n")
    shown: dict[str, set[str]] = {}
    for init in sorted(SOURCE.rglob("__init__.py"), key=lambda path: path.parts[:-1]):
        names = offered(init)
        if names is None:
            continue
        module = ".".join(init.relative_to(SOURCE).parts[:-1])
        index.write(f"- [{module}]({module}.md)\n")
        page = f"api/{module}.md"
        with mkdocs_gen_files.open(page, "w") as file:
            file.write(f"# `{module}`\n\n::: {module}\n    options: {{members: false}}\n")
            found = {definition(module, name): name for name in names if name != "__version__"}
            # What a room's own page has is not shown again for the package inside that defines it.
            inside = module.count(".") > 1
            above = shown.get(module.rpartition(".")[0], set()) if inside else set()
            shown[module] = set(found)
            for defined in sorted(set(found) - above, key=lambda one: found[one].lower()):
                file.write(f"\n::: {defined}\n    options: {SHOWN}\n")
        mkdocs_gen_files.set_edit_path(page, f"../{init.relative_to(ROOT)}")
