"""How fast a placement becomes descriptors, beside filling an array of that shape."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from benchmarks.timing import median_ms, show
from kvatlas import Layout, validate
from kvatlas.specs import FullAttention

LAYERS, BLOCKS = 64, 20_000


def descriptors() -> None:
    page = FullAttention(heads=8, head_dim=128).page(16)
    count = LAYERS * BLOCKS

    def fill() -> object:
        out = np.empty((count, 3), dtype=np.uint64)
        out.fill(7)
        return out

    floor = median_ms(fill)
    rows = [["numpy fill of that array (lower bound)", f"{floor:.1f}", "1.0"]]
    for order, over in (("LBNHC", ("L", "B")), ("BLHNC", ("L", "B")), ("BLHNC", ("B", "L"))):
        pool = page.place(Layout(order), pages=LAYERS, blocks=BLOCKS)
        made = pool.descriptors(*over)
        if made.shape != (count, 3):
            raise SystemExit(f"expected {count} descriptors, got {made.shape}")
        taken = median_ms(lambda p=pool, o=over: p.descriptors(*o, base=1 << 40))  # type: ignore[misc]
        name = f"{order}, slots then blocks" if over[0] == "L" else f"{order}, blocks then slots"
        rows.append([name, f"{taken:.1f}", f"{taken / floor:.1f}"])
    pool = page.place(Layout("LBNHC"), pages=LAYERS, blocks=BLOCKS)
    ids = np.random.default_rng(0).permutation(BLOCKS)[:2048]
    taken = median_ms(lambda: pool.descriptors("L", B=ids, base=1 << 40))
    rows.append(["LBNHC, 2,048 chosen blocks (131,072 rows)", f"{taken:.2f}", ""])
    show(
        f"Descriptors of {LAYERS} layers x {BLOCKS:,} blocks = {count:,} from one placement",
        ["how", "ms", "x lower bound"],
        rows,
    )
    print("The bar: at most 16 ms, half of the 32 ms of vLLM's builder on two cores.\n")


def validation() -> None:
    page = FullAttention(heads=8, head_dim=128).page(16)
    rows = []
    for order in ("LBNHC", "BLHNC", "BHLNC"):
        pool = page.place(Layout(order), pages=LAYERS, blocks=BLOCKS)
        slots = {f"layer {i}": pool.select("L", i) for i in range(LAYERS)}
        taken = median_ms(lambda s=slots, p=pool: validate(s, size=p.nbytes))  # type: ignore[misc]
        rows.append([order, f"{taken:.2f}"])
    show(f"Validating {LAYERS} layers of {BLOCKS:,} blocks", ["order", "ms"], rows)


def imports() -> None:
    def seconds(code: str) -> float:
        taken = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        return float(taken.stdout)

    clock = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"
    numpy = min(seconds(clock.format("numpy")) for _ in range(5)) * 1e3
    ours = min(seconds("import numpy; " + clock.format("kvatlas")) for _ in range(5)) * 1e3
    rows = [["import numpy", f"{numpy:.0f}"], ["import kvatlas, numpy loaded", f"{ours:.0f}"]]
    show("Import, best of 5 processes", ["what", "ms"], rows)


def main() -> None:
    descriptors()
    validation()
    imports()
