"""Generate the pages of the site that are not in docs/: the home page, the API and the map.

The home page is the README, with an interactive map in place of its picture. Every package of
kvatlas that lists its public names in `__all__` has a page.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import mkdocs_gen_files

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
sys.path.insert(0, str(SOURCE))

from kvatlas.errors import AtlasError  # noqa: E402
from kvatlas.geometry import ENGINE_LAYOUTS  # noqa: E402
from kvatlas.maps import Map  # noqa: E402
from kvatlas.planning import fit  # noqa: E402

REPOSITORY = "https://github.com/kvatlas/kvatlas"
IMAGES = "https://raw.githubusercontent.com/kvatlas/kvatlas/main/docs/"
SHOWN = "{show_root_heading: true, show_root_toc_entry: true}"
API = "reference/api"
COPIES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Pages in the root of the repository, and their names on the site."""
MODEL, GPUS = "Llama-3.1-70B", "4xH100"
"""The plan that the home page shows."""
MAP = "map/index.html"
PICTURE = re.compile(r"!\[[^\]]*\]\(images/map\.png\)")
FRAME = f"""\
<iframe class="map" src="{MAP}" title="The memory of {MODEL} on {GPUS}" loading="lazy"></iframe>

`kvatlas map {MODEL} --gpu {GPUS}`: weights, cache and overhead of one GPU, to scale. Click the
cache pool to see its blocks, layers and bytes, or [open the map]({MAP}){{target=_blank}}."""
WIDE = "---\nhide: [toc]\n---\n\n"
"""Leaves the room of the table of contents to the map."""
START = """\
<script>
document.querySelector("#crumbs button").click(); // start at the memory of the whole GPU
const follow = () => {
  const scheme = parent.document.body.dataset.mdColorScheme;
  document.documentElement.dataset.theme = scheme === "slate" ? "dark" : "light";
  updateAll();
};
try {
  follow();
  new MutationObserver(follow).observe(parent.document.body, { attributes: true });
} catch { /* The page stands alone, or its frame may not look outside. */ }
</script>
</body>"""
"""Starts the embedded map at the level of a GPU's memory, in the colours of the site."""


def linked(text: str) -> str:
    """Return a page whose links and images lead to the site instead of the repository."""
    text = text.replace(f"{REPOSITORY}/blob/main/docs/", "").replace(IMAGES, "")
    for page, name in COPIES.items():
        text = text.replace(f"{REPOSITORY}/blob/main/{page}", name)
    return text


def embedded_map() -> str:
    """Return the map of one model on GPUs, with a plan for each layout that it supports."""
    shown = fit(MODEL, GPUS)
    plans = []
    for layout in ENGINE_LAYOUTS:
        try:
            plans.append(fit(MODEL, GPUS, tp=shown.topology.tp, layout=layout.order).plan)
        except AtlasError:
            continue
    others = [plan for plan in plans if plan is not None and plan != shown.plan]
    if shown.plan is None:
        raise SystemExit(f"{MODEL} does not fit on {GPUS}.")
    return Map(shown.plan, others=others, fit=shown).html().replace("</body>", START)


def source(module: str) -> Path | None:
    """Return the file of a module or package of kvatlas; None if there is none of that name."""
    path = SOURCE.joinpath(*module.split("."))
    files = (path / "__init__.py", path.with_suffix(".py"))
    return next((file for file in files if file.exists()), None)


def offered(init: Path) -> list[str] | None:
    """Return the public names of a package; None if it has no `__all__`."""
    for node in ast.parse(init.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return None


def definition(module: str, name: str) -> str:
    """Return the full name of the definition of a module's name.

    mkdocstrings would follow imports too, but confuses a function with a module of the same name.
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
    text = linked((ROOT / page).read_text())
    with mkdocs_gen_files.open(name, "w") as file:
        file.write(WIDE + PICTURE.sub(FRAME, text) if name == "index.md" else text)
    mkdocs_gen_files.set_edit_path(name, f"../{page}")

with mkdocs_gen_files.open(MAP, "w") as file:
    file.write(embedded_map())

with mkdocs_gen_files.open(f"{API}/index.md", "w") as index:
    index.write("# API\n\nThe public names of each package. All other names may change.\n\n")
    shown: dict[str, set[str]] = {}
    for init in sorted(SOURCE.rglob("__init__.py"), key=lambda path: path.parts[:-1]):
        names = offered(init)
        if names is None:
            continue
        module = ".".join(init.relative_to(SOURCE).parts[:-1])
        index.write(f"- [{module}]({module}.md)\n")
        page = f"{API}/{module}.md"
        with mkdocs_gen_files.open(page, "w") as file:
            file.write(f"# `{module}`\n\n::: {module}\n    options: {{members: false}}\n")
            found = {definition(module, name): name for name in names if name != "__version__"}
            # A package's page does not repeat the names that its parent's page shows.
            inside = module.count(".") > 1
            above = shown.get(module.rpartition(".")[0], set()) if inside else set()
            shown[module] = set(found)
            for defined in sorted(set(found) - above, key=lambda one: found[one].lower()):
                file.write(f"\n::: {defined}\n    options: {SHOWN}\n")
        mkdocs_gen_files.set_edit_path(page, f"../{init.relative_to(ROOT)}")
