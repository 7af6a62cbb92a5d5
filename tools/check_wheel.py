"""The installed wheel, as somebody finds it who asked for no extra: `make wheel` runs this.

Run with `python -I`, so that neither this checkout nor the user's packages are seen.
"""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
import sysconfig
from importlib.metadata import distributions, version
from pathlib import Path

import kvatlas

ROOT = Path(__file__).parents[1]
ALONE = {"kvatlas", "msgspec", "numpy"}
CORE = ("errors", "geometry", "specs", "models", "planning", "routing")
LARGEST = 1_500_000
"""Bytes of the wheel."""
INSTALLERS = {"pip", "setuptools"}
EXAMPLES = re.compile(r"^```pycon\n(.*?)^```", re.MULTILINE | re.DOTALL)


def check(holds: bool, otherwise: str) -> None:
    """Leave, saying why, if it does not hold."""
    if not holds:
        raise SystemExit(f"The wheel is not fit to be published: {otherwise}")


def main() -> None:
    """Check what is installed, what the README says, and the command line."""
    beside = {found.metadata["Name"] for found in distributions()} - INSTALLERS
    check(beside == ALONE, f"{sorted(beside)} are installed, not {sorted(ALONE)}")

    folder = Path(kvatlas.__file__).parent
    check(Path(sys.prefix) in folder.parents, f"kvatlas was imported from {folder}")
    check(version("kvatlas") == kvatlas.__version__, "its metadata name another version")
    check((folder / "py.typed").exists(), "py.typed is missing, so its types are not seen")

    # The README's examples make a plan, from the catalogue that travels in the wheel.
    blocks = EXAMPLES.findall((ROOT / "README.md").read_text())
    examples = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "README.md", None, 0)
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(examples)
    check(result.attempted > 0, "the README has no examples")
    check(result.failed == 0, f"{result.failed} examples of the README fail without extras")

    # The page's style and scripts are files of their own.
    drawn = kvatlas.map(kvatlas.plan("Qwen3-8B", memory="1GiB", max_len=512))
    check(drawn.html().count("<script") == 2, "the page of a map is not whole")

    script = Path(sysconfig.get_path("scripts")) / "kvatlas"
    said = subprocess.run([script, "models"], capture_output=True, text=True, check=False)
    check(said.returncode == 69, f"the command line ended with {said.returncode}, not 69")
    check("pip install 'kvatlas[cli]'" in said.stderr, f"the command line says {said.stderr!r}")
    (wheel,) = (ROOT / "dist").glob("*.whl")
    size = wheel.stat().st_size
    check(size <= LARGEST, f"it has {size:,} bytes, more than {LARGEST:,}")
    print(f"kvatlas {kvatlas.__version__}: {result.attempted} examples ran without extras")
    print(f"The wheel has {size / 1e6:.2f} MB. Importing the core after numpy takes")
    print(f"{import_time():.0f} ms of CPU time (the fastest of 20 new processes).")


def import_time() -> float:
    """Return the milliseconds of CPU time to import the core, after numpy was imported."""
    packages = ", ".join(f"kvatlas.{package}" for package in CORE)
    code = f"""
import time, numpy
begun = time.process_time()
import {packages}
print(time.process_time() - begun)
"""
    command = [sys.executable, "-I", "-c", code]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(20)]
    return min(float(run.stdout) for run in runs) * 1000


if __name__ == "__main__":
    main()
