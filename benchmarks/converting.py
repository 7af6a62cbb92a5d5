"""How fast routes convert on this CPU, beside the plain copy of the same tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.timing import median_ms, show
from kvatlas.copying import copy_request
from kvatlas.planning import Plan, plan
from kvatlas.routing import route

TOKENS = 128
LAYERS, HEADS, DIM = 36, 8, 128
FORMATS = ("fp32", "fp16", "fp8", "int8_per_token_head", "int4_per_token_head", "nvfp4")


def planned(cache: str, layout: str, block: int) -> Plan:
    ask: dict[str, Any] = {"layout": layout, "block_size": block, "max_len": TOKENS}
    return plan("Qwen3-8B", memory="80MiB", kv_dtype=cache, **ask)


def pools(made: Plan, rng: np.random.Generator) -> dict[int, dict[int, Any]]:
    """Small numbers in every format: bytes whose top bits are those of ones."""
    data = {pool.index: rng.integers(0x30, 0x3F, pool.nbytes, np.uint8) for pool in made.pools}
    return {0: data}


def seconds(src: Plan, dst: Plan, convert: str | None) -> tuple[float, int]:
    """Seconds of one request, and the bytes that are read and written in pools."""
    scales = {} if convert is None else {"source_scales": 1.0, "destination_scales": 1.0}
    way = route(src, dst, convert=convert, **scales)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    here, there = pools(src, rng), pools(dst, rng)
    tables = [rng.permutation(made.num_blocks)[: TOKENS // made.block_size] for made in (src, dst)]
    about: dict[str, Any] = {
        "source_blocks": tables[0],
        "destination_blocks": tables[1],
        "tokens": TOKENS,
    }

    def act() -> int:
        return copy_request(way, here, there, **about)

    moved = way.needed_bytes(destination_rank=0, destination_blocks=tables[1], tokens=TOKENS)
    back = route(dst, src, convert=_turned(convert), **scales)  # type: ignore[arg-type]
    moved += back.needed_bytes(destination_rank=0, destination_blocks=tables[0], tokens=TOKENS)
    return median_ms(act, 3) / 1e3, moved


def _turned(convert: str | None) -> str | None:
    return convert and "->".join(convert.split("->")[::-1])


def main() -> None:
    src = planned("bf16", "LBNHC", 16)
    plain, moved = seconds(src, planned("bf16", "BHLNC", 32), None)
    rows = [["bf16, copied", f"{plain * 1e3:.0f}", f"{moved / plain / 1e9:.2f}", "1.00"]]
    rate = moved / plain
    for name in FORMATS:
        layout = "LBNHC" if name == "nvfp4" else "BHLNC"
        dst = planned(name, layout, 32)
        for ends in ((src, dst), (dst, src)):
            named = ("bf16", name) if ends[0] is src else (name, "bf16")
            taken, moved = seconds(*ends, "->".join(named))
            figures = f"{taken * 1e3:.0f}", f"{moved / taken / 1e9:.2f}"
            rows.append(["->".join(named), *figures, f"{moved / taken / rate:.2f}"])
    show(
        f"Converting {TOKENS} tokens of {LAYERS} layers, {HEADS} heads of {DIM}, blocks 16 <-> 32",
        ["what", "ms", "GB/s read and written", "of the copy's"],
        rows,
    )


if __name__ == "__main__":
    main()
