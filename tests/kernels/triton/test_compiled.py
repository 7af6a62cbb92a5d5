"""Kernels as a Hopper chip would run them, compiled where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.profiles import DEEP

triton = pytest.importorskip("triton")

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
pytestmark = pytest.mark.skipif(not TOOL.exists(), reason="this Triton has no disassembler")

FEW = """
import json
from benchmarks.gpu import sass
with sass.elsewhere("decode") as compiled:
    sass.decode("int8_per_token_head")
    sass.runs("")
print(json.dumps([sass.SHARED, [kernel._asdict() for kernel in compiled]]))
"""
MANY = """
import json
from benchmarks.gpu import sass
with sass.elsewhere("decode", "prefill_hopper") as compiled:
    sass.decode("int8_per_token_head", 60)
    sass.put("int4_per_token_head")
    sass.move("")
    sass.convert("fp8")
    sass.runs("")
print(json.dumps([sass.SHARED, [kernel._asdict() for kernel in compiled]]))
"""
LARGEST = """
import json
from benchmarks.gpu import sass
with sass.elsewhere("decode_latent") as compiled:
    sass.latent("auto")
with sass.elsewhere("none") as wide:
    sass.decode("auto", dim=512)
print(json.dumps([sass.SHARED, [kernel._asdict() for kernel in compiled + wide]]))
"""


def compiled_by(code: str) -> list[dict[str, Any]]:
    """Run code that compiles kernels, each of which fits in the chip's shared memory."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=env, cwd=root, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    room, kernels = json.loads(done.stdout.splitlines()[-1])
    assert max(kernel["shared"] for kernel in kernels) <= room
    return list(kernels)


def test_kernels_compile_for_a_chip_that_is_not_here() -> None:
    """Nothing is spilled, all fits, and decode's next tiles are on their way meanwhile.

    `make test-lowest-triton` compiles all kernels, with the lowest Triton and that of `make test`.
    """
    by_name = {kernel["name"]: kernel for kernel in compiled_by(MANY if DEEP else FEW)}
    others = {"prefill_hopper", "write_rows", "copy_rows", "convert_rows"}
    few = {"count_tiles", "decode", "merge", "copy_run_grid"}
    assert set(by_name) == (few | others if DEEP else few)
    if DEEP:
        prefill = by_name.pop("prefill_hopper")
        assert prefill["loop"]["HGMMA"] > 0
        # Groups of warps share out the registers; some do not fit, at a last tile most of all.
        assert prefill["spilled"] <= 272
    assert not any(kernel["spilled"] for kernel in by_name.values())
    loop = by_name["decode"]["loop"]
    assert loop["LDGSTS"] > loop.get("LDG", 0)
    assert loop["HMMA"] > 0


@pytest.mark.skipif(not DEEP, reason="run by make test-lowest-triton and make test-deep")
def test_the_largest_kernels_fit_in_shared_memory() -> None:
    """Latent decode, and decode of rows of 512 elements."""
    by_name = {kernel["name"]: kernel for kernel in compiled_by(LARGEST)}
    assert {"decode_latent", "decode"} <= set(by_name)
    # Of each of two groups of warps: logits of its own tile, sums of both.
    assert by_name["decode_latent"]["loop"]["HGMMA"] == 2 * (36 + 2 * 4)
    assert not by_name["decode_latent"]["spilled"]
