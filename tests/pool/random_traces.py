"""Random traces and random classes of layers, as the simulation and as the oracle sees them."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from kvatlas.simulate.layer_classes import LayerClass
from kvatlas.simulate.traces import Trace, TraceBuilder, TraceRequest
from kvatlas.specs import Visibility
from tests.pool.oracle import OracleClass

SAMPLE = Path(__file__).parent / "sample_trace.jsonl"
KEPT = ("every-block", "prompt-end", "branch-points", "vllm-default", "every-5")


Requests = list[tuple[Any, ...]]


def random_trace(dice: Random) -> tuple[Trace, Requests]:
    """Requests along the branches of a small tree of ids, and their tokens."""
    block, whole = dice.randint(1, 4), dice.random() < 0.5
    builder = TraceBuilder("drawn", block)
    numbers: dict[tuple[int, ...], int] = {}
    paths: list[list[int]] = [[]]
    requests = []
    for line in range(dice.randint(1, 20)):
        before = dice.choice(paths[-6:])
        path = before[: dice.randint(0, len(before))] if dice.random() < 0.4 else list(before)
        path += [dice.randint(0, 2) for _ in range(dice.randint(0, 4))]
        paths.append(path)
        length = max(len(path) * block - dice.randint(0, block - 1), 0)
        tokens: list[Any] = []
        ids = []
        for depth in range(-(-length // block)):
            count = min(block, length - depth * block)
            if count < block and whole:  # the last block of a prompt is not full, and has no id
                tokens += [(-1 - line, n) for n in range(count)]
                continue
            name = (*path[: depth + 1], *([-count] if count < block else []))
            ids.append(numbers.setdefault(name, len(numbers)))
            tokens += [(ids[-1], n) for n in range(count)]
        builder.add(f"line {line}", TraceRequest(length, ids))
        requests.append(tuple(tokens))
    return builder.finish(), requests


def random_classes(dice: Random) -> list[OracleClass]:
    """Alike groups of one or two pools: attention, windows, chunks, states."""
    pools = dice.randint(1, 2)
    found: dict[tuple[str, int, int, int], int] = {}
    for _ in range(dice.randint(1, 4)):
        needs = dice.choice(["all", "window", "chunk", "state"])
        width = dice.randint(1, 9)
        shape = (width * (needs == "window"), width * (needs == "chunk"))
        kind = "window" if any(shape) else needs
        found[kind, dice.randint(0, pools - 1), *shape] = dice.randint(1, 3)
    used = sorted({pool for _, pool, _, _ in found})
    return [OracleClass(k, used.index(p), size, w, c) for (k, p, w, c), size in found.items()]


def simulated(kind: OracleClass) -> LayerClass:
    seen = Visibility(window=kind.window or None, chunk=kind.chunk or None)
    needs: Any = kind.needs
    return LayerClass(needs, kind.pool, kind.size, seen, groups=kind.size)
