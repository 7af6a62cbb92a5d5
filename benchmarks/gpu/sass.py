"""What a kernel becomes on a chip that is not here: compiled for Hopper, its loops counted.

`python -m benchmarks.gpu.sass decode=fp8 write=auto copy runs latent=auto prefill=auto` prints for
each kernel that a call would launch its registers, the bytes that it spills, its shared
memory, and what its longest loop consists of. Nothing is run, and no GPU is asked for.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from benchmarks.gpu import tables
from kvatlas.cache import LayerCache
from kvatlas.copying.address_runs import convert_address_runs, copy_address_runs, place_starts
from kvatlas.geometry import DType, Layout
from kvatlas.kernels.cast_scales import place_scales
from kvatlas.kernels.triton import (
    BlockConversion,
    attend,
    attend_latent,
    copy_blocks,
    tune,
    write,
)
from kvatlas.kernels.triton import storage_formats as formats
from kvatlas.specs import FullAttention, LatentAttention, Spec
from kvatlas.specs.cell_formats import ElementCast

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
PROCESSORS = 132
SHARED = 232_448
"""Bytes of shared memory that a program may hold."""


class Compiled(NamedTuple):
    """A kernel for the chip."""

    name: str
    registers: int
    spilled: int
    shared: int
    loop: Counter[str]
    """Instructions of the longest inner loop that multiplies matrices, or of the longest."""


class _Chip:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def _tool(cubin: Path, what: str) -> str:
    command = [str(TOOLS / "cuobjdump"), what, str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _loops(code: str) -> Iterator[Counter[str]]:
    """The instructions between each branch back and its target, by their first names."""
    matches = re.findall(r"^\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);", code, flags=re.MULTILINE)
    lines = [(int(address, 16), re.sub(r"^@!?U?P\w+\s+", "", text)) for address, text in matches]
    place = {address: i for i, (address, _) in enumerate(lines)}
    for i, (_, text) in enumerate(lines):
        branch = re.search(r"^BRA.*0x([0-9a-f]+)", text)
        begin = place.get(int(branch[1], 16), i) if branch else i
        if begin < i:
            names = (re.split(r"[ .]", line)[0] for _, line in lines[begin : i + 1])
            yield Counter(names)


def _look(name: str, kernel: Any, counted: bool) -> Compiled:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        used = _tool(cubin, "--dump-resource-usage")
        code = _tool(cubin, "--dump-sass") if counted else ""
    loops = sorted(_loops(code), key=lambda loop: -loop.total())
    numbers = [int(n) for n in re.findall(r"REG:(\d+) STACK:(\d+)", used)[-1]]
    # The outer loop over sequences holds the others.
    inner = [loop for loop in loops if loop["HMMA"] + loop["HGMMA"]][1:]
    hot = (inner or loops or [Counter()])[0]
    return Compiled(name, numbers[0], numbers[1], kernel.metadata.shared, hot)


@contextmanager
def elsewhere(*names: str) -> Iterator[list[Compiled]]:
    """Calls compile for the chip instead of being launched; what they compile is listed.

    Loops are counted of kernels with these names, of all where none is given. Triton keeps the
    chip for its own from then on: this is for processes that do nothing else.
    """
    compiled: list[Compiled] = []
    run = jit.JITFunction.run

    def compile_only(self: Any, *args: Any, warmup: bool, **more: Any) -> Any:  # noqa: ARG001
        kernel = run(self, *args, warmup=True, **more)
        counted = not names or self.__name__ in names
        compiled.append(_look(self.__name__, kernel, counted))
        return kernel

    early = {"EARLY": True, "launch_pdl": True}
    with ExitStack() as stack:
        for module, name, value in (
            (jit.JITFunction, "run", compile_only),
            (formats, "takes_ptx", lambda _: True),
            (formats, "device_takes_ptx", lambda _: True),
            (formats, "dot_of", lambda q: formats._OF_TORCH[q.dtype]),
            (tune, "architecture", lambda _: "hopper"),
            (tune, "processors", lambda _: PROCESSORS),
            (tune, "shared_memory", lambda _: SHARED),
            (tune, "capability", lambda _: (9, 0)),
            (tune, "dependent_launch", lambda _: early),
        ):
            stack.enter_context(patch.object(module, name, value))
        driver.set_active(_Chip())
        yield compiled


def _layer(spec: Spec, order: str = "LBNHC", block: int = 16) -> LayerCache:
    page = spec.page(block)
    placed = page.place(Layout(order), pages=4, blocks=16)
    buffer = torch.empty(placed.stop, dtype=torch.uint8)
    return LayerCache("layers.1", spec, page, placed.select("L", 1), buffer)


def _batch(queries: int) -> dict[str, Any]:
    lengths = torch.full((4,), 64, dtype=torch.int32)
    tables = torch.zeros(4, 4, dtype=torch.int32)
    counts = torch.full((4,), queries, dtype=torch.int32)
    return {"tables": tables, "lengths": lengths, "queries": counts, "max_queries": queries}


def decode(cache: str, queries: int = 1, dim: int = 128) -> None:
    spec = FullAttention(heads=8, head_dim=dim, cache=cache)
    q = torch.empty(4 * queries, 32, dim, dtype=torch.bfloat16)
    attend(_layer(spec), q, **_batch(queries))


def latent(cache: str) -> None:
    spec = LatentAttention(cache=cache)
    q = torch.empty(4, 128, 576, dtype=torch.bfloat16)
    attend_latent(_layer(spec, block=64), q, scale=1.0, **_batch(1))


def sparse(cache: str) -> None:
    spec = LatentAttention(cache=cache)
    q = torch.empty(4, 128, 576, dtype=torch.bfloat16)
    indices = torch.zeros(4, 2048, dtype=torch.int32)
    attend_latent(_layer(spec, block=64), q, scale=1.0, indices=indices, **_batch(1))


def put(cache: str) -> None:
    spec = FullAttention(heads=8, head_dim=128, cache=cache)
    k, v = (torch.empty(64, 8, 128, dtype=torch.bfloat16) for _ in "kv")
    write(_layer(spec), k, v, torch.arange(64))


def move(_: str) -> None:
    spec, ids = FullAttention(heads=8, head_dim=128), torch.arange(4, dtype=torch.int32)
    copy_blocks(_layer(spec), ids, _layer(spec, "LBHNC"), ids)


def runs(programs: str) -> None:
    """From a large address to one that fits in 32 bits, as the host's may."""
    starts = place_starts(np.arange(256) * 4096, np.arange(256) * 8192, "cpu")
    spans = np.arange(8192) * 65536
    sizes = np.full(8192, 512)
    many = int(programs) if programs.isdigit() else 0
    copy_address_runs(1 << 40, 1 << 30, starts, (spans, spans, sizes), programs=many)


def casts(name: str) -> None:
    """Runs of elements that become those of a type: of bf16, or of fp8 where that is the type."""
    starts = place_starts(np.arange(256) * 4096, np.arange(256) * 8192, "cpu")
    spans = np.arange(8192) * 65536
    target = DType.of("fp8" if name == "auto" else name)
    source = DType.of("bf16" if target.item == 1 else "fp8")
    sizes = np.full(8192, 256)
    cast = ElementCast(source, target, ((0.5, 0.3),))
    scales = place_scales(cast, None, 256, "cpu")
    convert_address_runs(1 << 40, 1 << 41, starts, (spans, spans, sizes), cast, scales)


def convert(cache: str) -> None:
    """bf16 into a format."""
    spec, ids = FullAttention(heads=8, head_dim=128), torch.arange(4, dtype=torch.int32)
    other = FullAttention(heads=8, head_dim=128, cache=cache)
    BlockConversion([_layer(spec)], [_layer(other, "LBHNC")])(ids, ids)


CALLS: dict[str, Callable[[str], None]] = {
    "decode": decode,
    "prefill": lambda cache: decode(cache, 60),
    "latent": latent,
    "sparse": lambda cache: sparse("fp8_ds_mla" if cache == "auto" else cache),
    "write": put,
    "copy": move,
    "runs": runs,
    "cast": casts,
    "convert": lambda cache: convert("fp8" if cache == "auto" else cache),
}


def main(wanted: list[str]) -> None:
    rows = []
    for one in wanted or [f"{name}=auto" for name in CALLS]:
        name, _, cache = one.partition("=")
        with elsewhere() as compiled:
            CALLS[name](cache or "auto")
        for kernel in compiled:
            most = ", ".join(f"{n} {op}" for op, n in kernel.loop.most_common(10))
            numbers = (str(n) for n in (kernel.registers, kernel.spilled, kernel.shared))
            rows.append([one, kernel.name, *numbers, f"{kernel.loop.total()}: {most}"])
    columns = ("call", "kernel", "registers", "spilled", "shared", "its longest loop")
    tables.show("compiled for Hopper", columns, rows, left="cki")


if __name__ == "__main__":
    main(sys.argv[1:])
