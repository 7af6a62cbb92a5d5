"""The lowest versions that pyproject.toml admits, as constraints for pip.

`--installed` says instead what this Python has of them, and which are above their lowest.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]
RANGE = re.compile(r"([A-Za-z0-9_.-]+)>=([0-9][0-9a-z.]*)")


def lowest() -> dict[str, str]:
    """Name to lowest version, of the package and of every extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = [
        *project["dependencies"],
        *(name for needs in extras.values() for name in needs),
    ]
    ranges = {name: RANGE.fullmatch(name) for name in named if not name.startswith("kvatlas[")}
    loose = [name for name, match in ranges.items() if match is None]
    if loose:
        raise SystemExit(f"These name no lowest version, as NAME>=VERSION: {', '.join(loose)}")
    return {match[1]: match[2] for match in ranges.values() if match}


def main() -> None:
    """Print constraints, or what is installed."""
    parser = argparse.ArgumentParser(prog="lowest")
    parser.add_argument("--installed", action="store_true")
    installed = parser.parse_args().installed
    for name, floor in sorted(lowest().items()):
        if not installed:
            print(f"{name}=={floor}")
            continue
        try:
            here = version(name)
        except PackageNotFoundError:
            print(f"{name} {floor}: not installed")
            continue
        same = here.partition("+")[0].removesuffix(".0") == floor.removesuffix(".0")
        print(f"{name} {here}" + ("" if same else f": ABOVE the lowest, {floor}"))


if __name__ == "__main__":
    main()
