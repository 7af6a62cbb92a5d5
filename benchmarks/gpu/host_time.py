"""What a call costs the host: `attend` and `write`, beside bare launches of the same kernels.

A bare launch is Triton's own, with arguments that are at hand. What a call takes beyond them
is this library's: checks, and what it has worked out once for a layer. A call may take less than
they do: what it has launched for a batch of the same kind it launches again without Triton's look
at each argument. `python -m benchmarks.gpu.host_time` prints the table, a part of `make bench-gpu`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from triton.runtime import jit

from benchmarks.gpu import tables
from benchmarks.gpu.cells import DEVICE, layers_of
from kvatlas.cache import LayerCache
from kvatlas.kernels.triton import launch_write, split_of
from kvatlas.kernels.triton import schedule as make_schedule
from kvatlas.kernels.triton.attention import launch
from kvatlas.specs import FullAttention

BAR = 40.0
"""Microseconds beyond the bare launches, at most."""
_LAYERS = 16
_TURNS = 60


class HostTime(NamedTuple):
    """Microseconds of the host for one call."""

    what: str
    call: float
    bare: float
    """Of the kernels that it launches, by themselves."""
    launches: int
    allocations: int
    """Of memory on the device, without what the call returns."""
    most_allocations: int | None = None
    """Of these, where that is a goal too."""

    @property
    def beyond(self) -> float:
        """What the call takes more than its launches."""
        return self.call - self.bare

    @property
    def ok(self) -> bool:
        """Whether it is as little as it should be."""
        most = self.most_allocations
        return self.beyond <= BAR and (most is None or self.allocations <= most)

    def row(self) -> list[str]:
        """As a row of the table."""
        verdict = "ok" if self.ok else "over"
        times = [f"{n:.1f}" for n in (self.call, self.bare, self.beyond)]
        counts = [str(self.launches), str(self.allocations)]
        return [self.what, *times, *counts, f"{BAR:.0f}", verdict]


def bare_launches(act: Callable[[], Any]) -> list[Callable[[], Any]]:
    """The launches of a call, to be made again by themselves."""
    kept: list[Callable[[], Any]] = []
    run = jit.JITFunction.run

    def keep(self: Any, *given: Any, grid: Any, warmup: bool, **more: Any) -> Any:
        kept.append(lambda: self[grid](*given, **more))
        return run(self, *given, grid=grid, warmup=warmup, **more)

    with patch.object(jit.JITFunction, "run", keep):
        act()
    return kept


def microseconds(*ways: Callable[[], Any]) -> list[float]:
    """The host's time for one turn of each way, medians: a busy host disturbs all alike.

    They take turns, and the device is waited for after each.
    """
    taken: list[list[float]] = [[] for _ in ways]
    for _ in range(_TURNS):
        for act, times in zip(ways, taken, strict=True):
            begin = time.perf_counter()
            act()
            times.append(1e6 * (time.perf_counter() - begin))
            torch.cuda.synchronize()
    return [statistics.median(times) for times in taken]


def _allocations(act: Callable[[], Any]) -> int:
    name = "allocation.all.allocated"
    before = torch.cuda.memory_stats()[name]
    kept = act()
    del kept
    return int(torch.cuda.memory_stats()[name] - before)


class HostCall(NamedTuple):
    """A call that is made for each of some layers, as a step of an engine makes it."""

    what: str
    layers: list[LayerCache]
    call: Callable[[LayerCache], Any]
    returned: int = 0
    """Allocations that are what it returns."""
    most: int | None = None
    """Other allocations at most, where that is a goal."""

    def step(self) -> None:
        """A call for each layer."""
        for layer in self.layers:
            self.call(layer)

    def measured(self) -> HostTime:
        """The host's time for one call, beside that of its launches."""
        for layer in self.layers:
            layer.kept.clear()  # what a layer keeps it does not launch by Triton's own way
        launches = bare_launches(self.step)
        self.step()
        torch.cuda.synchronize()
        allocated = _allocations(lambda: self.call(self.layers[0])) - self.returned
        whole, bare = microseconds(self.step, lambda: [act() for act in launches])
        many = len(self.layers)
        return HostTime(
            self.what, whole / many, bare / many, len(launches) // many, allocated, self.most
        )


def calls() -> list[HostCall]:
    """A step of 16 sequences of few tokens: the device is never what is waited for."""
    spec, block, sequences = FullAttention(heads=8, head_dim=128), 16, 16
    layers = layers_of(spec, "LBNHC", block=block, blocks=64, slots=_LAYERS)
    q = torch.randn(sequences, 32, 128, dtype=torch.bfloat16, device=DEVICE)
    rows = q[:, :8].contiguous()
    numbers = torch.arange(sequences, dtype=torch.int32, device=DEVICE)
    batch: dict[str, Any] = {
        "tables": numbers[:, None].expand(-1, 2).contiguous(),
        "lengths": torch.full_like(numbers, 20),
    }
    one = torch.ones_like(numbers)
    split = split_of(layers[0], 32, max_queries=1)
    prepared = make_schedule(split, batch["lengths"], one)
    out = torch.empty_like(q)
    slots = numbers.long() * block
    return [
        HostCall(
            "attend, any batch", layers,
            lambda layer: launch.attend(layer, q, queries=one, **batch), returned=1,
        ),
        HostCall(
            "attend, one query each", layers,
            lambda layer: launch.attend(layer, q, queries=one, max_queries=1, **batch), returned=1,
        ),
        HostCall(
            "the same, prepared, into `out`", layers,
            lambda layer: launch.attend(
                layer, q, max_queries=1, prepared=prepared, out=out, **batch
            ),
            most=0,
        ),
        HostCall("write", layers, lambda layer: launch_write.write(layer, rows, rows, slots)),
    ]  # fmt: skip


def compile_calls() -> None:
    """Make each call once."""
    for one in calls():
        one.call(one.layers[0])


def table() -> list[HostTime]:
    """Print the table; what was measured."""
    figures = [one.measured() for one in calls()]
    columns = ("call", "us", "bare launches", "beyond", "launches", "allocations", "bar", "")
    title = f"Host time of a call, {torch.cuda.get_device_name()}, medians of {_TURNS}"
    tables.show(title, columns, [figure.row() for figure in figures], left="c")
    return figures


if __name__ == "__main__":
    table()
