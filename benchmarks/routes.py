"""How fast routes compile, bind and prepare, beside numpy's own cost and vLLM's functions."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import vllm_peer
from benchmarks.timing import median_ms, show
from kvatlas.errors import AtlasError
from kvatlas.models import Layer, Model, catalogue
from kvatlas.planning import Plan, plan
from kvatlas.routing import Route, route
from kvatlas.specs import FullAttention

LAYERS, BLOCKS, BOUND = 64, 20_000, 2_048
COUNTED = 4_096


def dense() -> Model:
    spec = FullAttention(heads=8, head_dim=128)
    layers = tuple(
        Layer(name=f"layers.{index}.attn", index=index, spec=spec) for index in range(LAYERS)
    )
    return Model(
        name="dense",
        architecture="Dense",
        layers=layers,
        depth=LAYERS,
        attention_heads=64,
        max_len=BOUND * 16,
    )


def pair(source_order: str = "LBHNC", destination_order: str = "LBHNC") -> tuple[Plan, Plan]:
    model = dense()
    page = 16 * 512  # bytes of a head in a block
    memory = LAYERS * BLOCKS * page
    src = plan(model, memory=4 * memory, tp=2, layout=source_order)
    dst = plan(model, memory=8 * memory, tp=1, layout=destination_order)
    if (src.num_blocks, dst.num_blocks) != (BLOCKS, BLOCKS):
        raise SystemExit(f"expected {BLOCKS} blocks, got {src.num_blocks} and {dst.num_blocks}")
    return src, dst


def peak_mb(act: Callable[[], Any]) -> float:
    """Megabytes that were in use at once, at most."""
    tracemalloc.start()
    act()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1e6


def preparing() -> None:
    way = route(*pair())

    def own() -> Any:
        return [way.prepare(source_rank=rank, destination_rank=0).destination for rank in (0, 1)]

    def both() -> Any:
        made = [way.prepare(source_rank=rank, destination_rank=0) for rank in (0, 1)]
        return [(one.source, one.destination) for one in made]

    def strided() -> Any:
        made = [way.prepare(source_rank=rank, destination_rank=0) for rank in (0, 1)]
        return [(one.strided(0), one.strided(1)) for one in made]

    rows = []
    for name, act in (
        ("the destination's lists, one for each source rank", own),
        ("and the lists of both sources", both),
        ("all four as strided rows", strided),
    ):
        rows.append([name, f"{median_ms(act, 7):.1f}", f"{peak_mb(act):.0f}"])
    if vllm_peer.installed():
        act = vllm_peer.splitter(LAYERS, BLOCKS)
        rows.append(
            ["vLLM: the destination's lists", f"{median_ms(act, 3):.0f}", f"{peak_mb(act):.0f}"]
        )
    else:
        rows.append(["vLLM: the destination's lists (not installed here)", "-", "-"])
    show(
        f"All of {LAYERS} layers x {BLOCKS:,} blocks, prefill tp 2 -> decode tp 1",
        ["what", "ms", "peak MB"],
        rows,
    )
    print("The bar: 1/50 of vLLM's 3,500 ms and 1/5 of its 405 MB: 70 ms and 81 MB.\n")


def binding() -> None:
    rng = np.random.default_rng(0)
    rows = []
    for source_order, destination_order in (("LBHNC", "LBHNC"), ("BLHNC", "BHLNC")):
        way = route(*pair(source_order, destination_order))
        for blocks in ("scattered", "neighbours"):
            ids = [
                rng.permutation(BLOCKS)[:BOUND] if blocks == "scattered" else np.arange(BOUND)
                for _ in range(2)
            ]
            taken, streamed, floor, count = _bind(way, ids[0], ids[1])
            name = f"{source_order} -> {destination_order}, {blocks} blocks"
            figures = (taken, floor, taken - floor, streamed)
            rows.append([name, f"{count:,}", *(f"{figure:.2f}" for figure in figures)])
    show(
        f"Binding {BOUND:,} blocks of {LAYERS} layers, tp 2 -> 1, one source rank",
        ["what", "descriptors", "ms", "numpy fills", "beyond", "as a stream"],
        rows,
    )
    print("The bar: at most 1 ms beyond numpy's own cost of filling the arrays.\n")


def _bind(way: Route, src: Any, dst: Any) -> tuple[float, float, float, int]:
    """Milliseconds to bind, to walk a stream, and to fill the arrays; how many descriptors."""
    asked: dict[str, Any] = {"source_rank": 0, "destination_rank": 0, "tokens": BOUND * 16}

    def act() -> Any:
        return way.bind(source_blocks=src, destination_blocks=dst, **asked)

    def stream() -> Any:
        return sum(map(len, way.stream(source_blocks=src, destination_blocks=dst, **asked).walk()))

    count = len(act())
    rows, along = np.arange(max(1, count // BOUND)) * 4096, np.arange(min(count, BOUND)) * 512

    def fill() -> Any:
        starts = [(rows[:, None] + along).reshape(-1) for _ in range(2)]
        return starts, np.full(len(starts[0]), 512)

    return median_ms(act, 41), median_ms(stream, 41), median_ms(fill, 41), count


def compiling() -> None:
    rows = []
    for name in ("DeepSeek-V4-Flash", "DeepSeek-V4-Pro", "Qwen3.5-397B-A17B"):
        ends = [plan(name, memory="100GiB", tp=tp) for tp in (8, 4)]

        def act(src: Plan = ends[0], dst: Plan = ends[1]) -> Any:
            way = route(src, dst)
            return [
                way.compile(source_rank=source, destination_rank=rank)
                for rank in range(dst.tp)
                for source in way.sources(rank)
            ]

        rows.append([f"{name}, {len(ends[0].layers)} caches", f"{median_ms(act):.1f}"])
    show("Compiling a route, tp 8 -> tp 4, for every pair of ranks", ["model", "ms"], rows)
    print("The bar: at most 50 ms.\n")


def counting() -> None:
    """Runs between two equal plans whose blocks follow each other."""
    rows = []
    for name in sorted(catalogue()):
        for order in ("BLNHC", "LBNHC"):
            try:
                made = plan(name, memory="1TiB", layout=order, max_len=2 * COUNTED)
            except AtlasError:  # DeepSeek-V4's backends support only block-outermost orders
                continue
            counts = [_equal_plans(made, padding=padding) for padding in (False, True)]
            (apart, needed), (together, nbytes) = counts
            rows.append(
                [
                    f"{name}, {order}", f"{apart:,}", f"{together:,}", f"{_cut_pages(made):,}",
                    f"{needed / 1e6:.1f}", f"{nbytes / 1e6:.1f}",
                ]
            )  # fmt: skip
    show(
        f"Runs of {COUNTED:,} tokens between two equal plans, neighbouring blocks, tp 1",
        ["model, order", "fields only", "runs", "cut pages", "MB of fields", "MB"],
        rows,
    )
    print("The bar: a run for the blocks of each group (BLNHC) or of each layer (LBNHC). Pages of")
    print("which a request needs some states, at the edges of windows and requests, are apart.\n")


def _cut_pages(made: Plan) -> int:
    """Pages of which a request needs some tokens, but not all."""
    count = 0
    for region in made.regions:
        group = made.groups[region.group]
        if group.kind == "recurrent" or group.source:
            continue
        first = max(0, COUNTED - group.window + 1) if group.window else 0
        edges = {edge // group.block for edge in (first, COUNTED) if edge % group.block}
        count += len(region.layers) * len(edges)
    return count


def _equal_plans(made: Plan, *, padding: bool) -> tuple[int, int]:
    """Runs and bytes of a request."""
    first: dict[int, int] = {}
    tables = {}
    for index, group in enumerate(made.groups):
        start = first.get(group.pool, 1)
        stop = first[group.pool] = start + (
            1 if group.kind == "recurrent" else -(-COUNTED // group.block)
        )
        tables[index] = list(range(start, stop))
    way = route(made, made, padding=padding)
    bound = way.bind(
        source_rank=0,
        destination_rank=0,
        source_blocks=tables,
        destination_blocks=tables,
        tokens=COUNTED,
    )
    return len(bound), bound.nbytes


def main() -> None:
    compiling()
    counting()
    binding()
    preparing()
