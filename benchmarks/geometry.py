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


CORE = ("errors", "geometry", "specs", "models", "planning", "routing")
FIRST_USE = """
from kvatlas import plan, route
prefill, decode = (plan("Qwen3-8B", memory="80GiB", tp=tp) for tp in (2, 1))
route(prefill, decode).compile(source_rank=0, destination_rank=0)
"""


def imports() -> None:
    """Print the CPU time of imports, each the least of 20 new processes."""
    core = "import " + ", ".join(f"kvatlas.{package}" for package in CORE)
    steps = {
        "import numpy": ("", "import numpy"),
        "import the core, numpy loaded (bar: 60 ms)": ("import numpy", core),
        "its first plan and route": (f"import numpy; {core}", FIRST_USE),
    }
    rows = [[name, f"{_cpu_ms(*step):.0f}"] for name, step in steps.items()]
    show("Import, CPU time, least of 20 processes", ["what", "ms"], rows)


def _cpu_ms(before: str, code: str) -> float:
    """Milliseconds of CPU time of `code`, after `before`, in the fastest of 20 new processes."""
    lines = (before, "import time; begun = time.process_time()", code)
    command = [sys.executable, "-c", "\n".join((*lines, "print(time.process_time() - begun)"))]
    runs = [subprocess.run(command, capture_output=True, check=True) for _ in range(20)]
    return min(float(run.stdout) for run in runs) * 1e3


def main() -> None:
    descriptors()
    validation()
    imports()


if __name__ == "__main__":
    main()
