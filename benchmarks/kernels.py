"""How fast rows and blocks move, beside a plain memcpy of the same bytes in the same run.

One thread on both sides, and pools well above the caches. Blocks are taken in the two ways
that occur: in stretches of neighbours, as a fresh pool hands them out, and scattered.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.timing import show
from kvatlas.cache import Cache, LayerCache, allocate
from kvatlas.geometry import ENGINE_LAYOUTS
from kvatlas.geometry.combine import fold_beside
from kvatlas.kernels import copy_blocks, gather_blocks, read, write
from kvatlas.models import Layer, Model
from kvatlas.planning import plan
from kvatlas.specs import FullAttention

ORDERS = [layout.order for layout in ENGINE_LAYOUTS]
POOL = 256 << 20
STRETCH = 32
"""Neighbours in a stretch: a request of 512 tokens."""

PAGES = {4: (1, 64), 16: (2, 128), 64: (8, 128)}
"""KiB of a page of 16 tokens: (kv heads, head size), bf16."""

NAME = "layers.1.attn"


@dataclass(frozen=True)
class Case:
    """One kind of page in one order: a live cache of two layers, and its spec."""

    spec: FullAttention
    cache: Cache

    @classmethod
    def of(cls, kib: int, order: str) -> Case:
        """A page of so many KiB, live."""
        heads, dim = PAGES[kib]
        spec = FullAttention(heads=heads, head_dim=dim)
        layers = [Layer(name=f"layers.{i}.attn", index=i, spec=spec) for i in range(2)]
        model = Model(
            name="benchmark",
            architecture="Benchmark",
            layers=tuple(layers),
            depth=2,
            attention_heads=heads,
            max_len=512,
        )
        made = plan(model, memory=POOL, layout=order, block_size=16, max_len=512)
        cache = allocate(made)
        for pool in cache.pools.values():
            pool.fill_(1)
        return cls(spec, cache)

    def rows(self, *, scattered: bool) -> tuple[float, float]:
        """Fractions of writing and of reading K and V of half of all blocks."""
        ids = choose(self.blocks, scattered=scattered, seed=3)
        slots = (ids.unsqueeze(1) * 16 + torch.arange(16)).flatten()
        shape = (len(slots), self.spec.heads, self.spec.head_dim)
        k, v = (torch.ones(shape, dtype=torch.bfloat16) for _ in range(2))
        puts = partial(write, self.layer, k, v, slots)
        gets = partial(read, self.layer, slots, out=(k, v))
        return fraction(puts, 2 * k.nbytes), fraction(gets, 2 * k.nbytes)

    @property
    def layer(self) -> LayerCache:
        """The layer that is measured."""
        return self.cache[NAME]

    @property
    def blocks(self) -> int:
        """Blocks of it."""
        return int(self.layer.kernel_blocks.size("B"))


def choose(count: int, *, scattered: bool, seed: int) -> torch.Tensor:
    """Half of all blocks, one by one or in stretches of neighbours, in a random order."""
    width = 1 if scattered else STRETCH
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randperm(count // width, generator=generator)[: count // width // 2] * width
    return (starts.unsqueeze(1) + torch.arange(width)).flatten()


def fraction(act: Callable[[], Any], nbytes: int, repeat: int = 5) -> float:
    """Speed of `act` as a fraction of memcpy's, in turns so that both see one machine.

    Both run in one thread, so that the processor's time is the time they take; what others
    do on a busy machine then counts for little.
    """
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.zeros(nbytes, dtype=torch.uint8)
    act()
    ours, plain = [], []
    for _ in range(repeat):
        start = time.process_time()
        act()
        middle = time.process_time()
        target.copy_(source)
        ours.append(middle - start)
        plain.append(time.process_time() - middle)
    return statistics.median(plain) / statistics.median(ours)


def run_of(a: Case, b: Case) -> int:
    """Bytes that are one stretch on both sides of a copy."""
    sides = fold_beside(a.layer.kernel_blocks, b.layer.kernel_blocks, axis="B")
    return int(sides[0].item)


def copies(kib: int) -> None:
    """Every order to every order."""
    for scattered in (False, True):
        rows = []
        targets = {order: Case.of(kib, order) for order in ORDERS}
        for order in ORDERS:
            a = Case.of(kib, order)
            ids = choose(a.blocks, scattered=scattered, seed=1)
            nbytes = len(ids) * a.layer.page.nbytes
            row = [order]
            for b in targets.values():
                places = choose(b.blocks, scattered=scattered, seed=2)[: len(ids)]
                got = fraction(partial(copy_blocks, a.layer, ids, b.layer, places), nbytes)
                row.append(f"{got:.2f} ({_size(run_of(a, b))})")
            rows.append(row)
        how = "scattered blocks" if scattered else f"stretches of {STRETCH} neighbouring blocks"
        show(
            f"Copy of {how}, pages of {kib} KiB, as a fraction of memcpy (run)",
            ["from / to", *ORDERS],
            rows,
        )


def rows_in_and_out() -> None:
    """Writing and reading K and V by slots, whole blocks of them."""
    table = []
    for kib in PAGES:
        for order in ORDERS:
            case = Case.of(kib, order)
            row = [f"{kib} KiB, {order}"]
            for scattered in (False, True):
                row += [f"{part:.2f}" for part in case.rows(scattered=scattered)]
            table.append(row)
    show(
        "K and V by slots, as a fraction of memcpy (runs of one head's row: 128 or 256 B)",
        ["page, order", "write, neighbours", "read", "write, scattered blocks", "read"],
        table,
    )


def gathers() -> None:
    """Whole blocks out of a layer, one behind the other."""
    table = []
    for kib in PAGES:
        for order in ORDERS:
            case = Case.of(kib, order)
            row = [f"{kib} KiB, {order}"]
            for scattered in (False, True):
                ids = choose(case.blocks, scattered=scattered, seed=4)
                out = gather_blocks(case.layer, ids)
                got = fraction(partial(gather_blocks, case.layer, ids, out=out), out.nbytes)
                row.append(f"{got:.2f}")
            table.append(row)
    show(
        "Gather of blocks, as a fraction of memcpy",
        ["page, order", "neighbours", "scattered"],
        table,
    )


def _size(nbytes: int) -> str:
    return f"{nbytes >> 10} KiB" if nbytes >= 1024 else f"{nbytes} B"


def main() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for kib in PAGES:
            copies(kib)
        gathers()
        rows_in_and_out()
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
