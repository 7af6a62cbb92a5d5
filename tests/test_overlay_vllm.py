"""A release of vLLM over the compiled files of an installed one: what is unpacked and linked."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

import pytest
from tools.overlay_vllm import link_compiled, unpack


def test_python_files_of_the_wheel_and_compiled_files_of_the_installed_one(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm-9.9.0-py3-none-any.whl"
    theirs = {
        "vllm/__init__.py": "new",
        "vllm/deep/model.json": "{}",
        "vllm/_C.abi3.so": "for a GPU",
        "vllm/deep/kernel.cubin": "for a GPU",
        "vllm-9.9.0.dist-info/METADATA": "Version: 9.9.0",
        "vllm-9.9.0.dist-info/entry_points.txt": "",
    }
    with ZipFile(wheel, "w") as archive:
        for name, content in theirs.items():
            archive.writestr(name, content)
    installed, folder = tmp_path / "installed" / "vllm", tmp_path / "overlay"
    (installed / "deep").mkdir(parents=True)
    for name in ("__init__.py", "_C.abi3.so", "deep/spin.abi3.so"):
        (installed / name).write_text("of the installed one")
    unpack(wheel, folder)
    link_compiled(installed, folder / "vllm")
    found = {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }
    kept = {name: content for name, content in theirs.items() if "GPU" not in content}
    compiled = ["vllm/_C.abi3.so", "vllm/deep/spin.abi3.so"]
    assert found == kept | dict.fromkeys(compiled, "of the installed one")


def test_without_compiled_files_nothing_can_run(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no compiled files"):
        link_compiled(tmp_path, tmp_path / "overlay")
