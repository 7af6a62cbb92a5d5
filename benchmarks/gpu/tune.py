"""Measures launch parameters on this GPU and writes the best into a file of rules.

`python -m benchmarks.gpu.tune rules.json [kernel ...]`; `KVATLAS_TUNE=rules.json` then uses
them, and `src/kvatlas/kernels/triton/tuned_launches.json` is where they are shipped.
"""

from __future__ import annotations

import json
import math
import sys
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu import attention, copies, writes
from benchmarks.gpu.cells import Cell, measure
from benchmarks.gpu.compiling import compile_all, compile_cell
from kvatlas.kernels.triton import tune
from kvatlas.specs import FullAttention


class Search(NamedTuple):
    """Choices that are tried for a kernel, and the cells that judge them."""

    kernel: str
    when: dict[str, Any]
    cells: list[Cell]
    choices: list[dict[str, Any]]


def _grid(**axes: list[Any]) -> list[dict[str, Any]]:
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def _list(names: str, *rows: tuple[Any, ...]) -> list[dict[str, Any]]:
    return [dict(zip(names.split(), row, strict=True)) for row in rows]


def _decode(spec: FullAttention, *where: tuple[str, int, tuple[int, int]]) -> list[Cell]:
    return [
        Cell(
            f"decode {batch[0]} x {batch[1]} {spec.cache} D {spec.head_dim}", f"{order} {block}",
            partial(attention.decode, spec, order, block, batch, 4, 1 if batch[0] > 16 else 2),
        )
        for order, block, batch in where
    ]  # fmt: skip


def searches() -> list[Search]:
    """Everything that is tuned."""
    big = attention.BIG
    both = (("LBNHC", 16, big), ("LBHNC", 64, big))
    decode = "tile warps stages per_sm evict"
    tuned = [
        Search(
            "copy", {},
            [Cell("copy", f"{a} {b} {kib}", partial(copies.on_device, a, b, kib, 1))
             for a, b, kib in (("BLNHC", "BLHNC", 16), ("BHLNC", "BLNHC", 16),
                               ("LBNHC", "LHBNC", 64))],
            _list(
                "tile warps per_sm evict load store",
                (4096, 2, 0, "evict_first", "", ""), (4096, 2, 0, "", ".cg", ""),
                (4096, 2, 0, "", ".cg", ".cg"), (4096, 1, 0, "evict_first", "", ""),
                (4096, 1, 0, "", ".cg", ""), (2048, 1, 0, "evict_first", "", ""),
                (2048, 1, 0, "", ".cg", ""), (4096, 4, 0, "evict_first", "", ""),
                (8192, 2, 0, "evict_first", "", ""),
            ),
        ),
        Search(
            "copy_host", {},
            [Cell("host", f"{a} {b} {kib} {way}", partial(copies.to_or_from_host, a, b, kib, way))
             for a, b, kib in (("LBHNC", "LBHNC", 64), ("LBNHC", "BHLNC", 32))
             for way in (True, False)],
            _list(
                "tile warps programs evict stages load store",
                (16384, 16, 8, "", 3, "", ""), (16384, 8, 8, "", 3, "", ""),
                (16384, 8, 8, "", 4, "", ""), (32768, 16, 8, "", 3, "", ""),
                (16384, 8, 12, "", 3, "", ""), (16384, 8, 16, "", 3, "", ""),
                (32768, 16, 16, "", 3, "", ""), (8192, 4, 16, "", 6, "", ""),
                (16384, 8, 4, "", 5, "", ""),
            ),
        ),
        Search(
            "write", {},
            [Cell("write", f"{order} {block}",
                  partial(writes.new_tokens, attention.BASE, order, block, 8192))
             for order, block in (("LBNHC", 16), ("LHBNC", 64))],
            _list("tile warps", (1024, 1), (1024, 2), (2048, 2), (2048, 4), (4096, 4), (4096, 8),
                  (8192, 4), (8192, 8), (512, 1), (1024, 4)),
        ),
        Search(
            "decode", {"cache": "auto", "dim": 128, "rows": 8},
            _decode(attention.BASE, *both, ("LBNHC", 16, attention.LONG)),
            _list(decode, (64, 4, 3, 2, ""), (64, 4, 4, 2, ""), (64, 4, 3, 3, ""),
                  (32, 4, 4, 4, ""), (128, 4, 2, 2, ""), (64, 2, 3, 3, ""), (32, 2, 4, 4, ""),
                  (32, 1, 4, 4, ""), (32, 1, 3, 6, ""), (32, 1, 2, 8, "")),
        ),
    ]  # fmt: skip
    for cache in ("fp8", "int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"):
        spec = FullAttention(heads=8, head_dim=128, cache=cache)
        tuned.append(
            Search(
                "decode", {"cache": cache, "dim": 128, "rows": 8}, _decode(spec, both[0]),
                _list(
                    f"{decode} registers",
                    (32, 1, 2, 8, "", None), (32, 1, 4, 8, "", None), (32, 1, 3, 8, "", None),
                    (64, 2, 3, 4, "", None), (128, 4, 3, 2, "", None),
                    (64, 4, 3, 3, "", 168), (64, 4, 2, 3, "", 168), (64, 4, 3, 4, "", 128),
                    (32, 4, 3, 4, "", 128), (32, 2, 3, 6, "", 168), (128, 8, 2, 2, "", 128),
                    (128, 8, 3, 2, "", 128), (32, 4, 3, 3, "", 168), (64, 4, 4, 3, "", 168),
                    (32, 2, 3, 8, "", 128), (64, 2, 3, 5, "", 200), (128, 4, 2, 3, "", 168),
                )  # fmt: skip,
            )
        )  # fmt: skip
    for dim in (64, 256):
        spec = FullAttention(heads=8, head_dim=dim)
        tuned.append(
            Search(
                "decode", {"cache": "auto", "dim": dim, "rows": 8},
                _decode(spec, ("LBNHC", 16, (64, 4096))),
                _list(decode, (64, 1, 2, 8, ""), (16, 1, 4, 4, ""), (64, 4, 3, 2, ""),
                      (32, 4, 4, 2, ""), (128, 4, 3, 2, ""),
                      (32, 4, 3, 2, ""), (64, 4, 4, 3, ""), (64, 8, 3, 1, "")),
            )
        )  # fmt: skip
    tuned.append(
        Search(
            "decode", {"latent": True, "dim": 512},
            [Cell("MLA", "64 x 4096",
                  partial(attention.latent, (64, 4096), "auto", "LBNHC", "GB/s"))],
            _list(decode, (32, 8, 2, 1, ""), (64, 8, 2, 1, ""), (16, 8, 3, 1, ""),
                  (32, 8, 3, 1, ""), (32, 4, 2, 1, ""), (64, 4, 2, 1, "")),
        )
    )  # fmt: skip
    tuned.append(
        Search(
            "prefill", {"dim": 128},
            [Cell("prefill", f"{order} {block}",
                  partial(attention.prefill, attention.BASE, order, block, (1, 8192)),
                  unit="TFLOP/s") for order, block in (("LBNHC", 16), ("LBHNC", 64))],
            _list("rows tile warps stages", (128, 64, 8, 3), (128, 64, 4, 3), (128, 128, 8, 2),
                  (128, 128, 8, 3), (64, 64, 4, 3), (128, 32, 4, 4), (64, 128, 4, 2),
                  (128, 64, 8, 2), (128, 64, 4, 2)),
        )
    )  # fmt: skip
    return tuned


def main(path: Path, kernels: list[str]) -> None:
    """Compile everything side by side, then time one after the other."""
    begun = time.time()
    chosen = [
        search
        for search in searches()
        if not kernels or f"{search.kernel} {search.when.get('cache', '')}".strip() in kernels
    ]
    compile_all(
        [
            partial(compile_cell, cell, choice)
            for search in chosen
            for choice in search.choices
            for cell in search.cells
        ]
    )
    log = []
    for search in chosen:
        scores = []
        for choice in search.choices:
            results = [measure(cell, choice, repeat=11) for cell in search.cells]
            figures = [r.figure if r.figure and r.right else 1e-9 for r in results]
            scores.append(math.exp(sum(map(math.log, figures)) / len(figures)))
            notes = [r.note[:120] or ("" if r.right else "WRONG") for r in results]
            print(
                search.kernel, search.when, choice, [round(r.figure or 0) for r in results],
                *filter(None, notes), flush=True,
            )  # fmt: skip
            log.append([search.kernel, search.when, choice, [r.figure for r in results], notes])
        best = search.choices[max(range(len(scores)), key=scores.__getitem__)]
        print("best:", search.kernel, search.when, best, f"{time.time() - begun:.0f} s", flush=True)
        tune.remember(
            path, tune.architecture(torch.device("cuda", 0)), search.kernel, search.when, best
        )
        path.with_suffix(".log.json").write_text(json.dumps(log))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
