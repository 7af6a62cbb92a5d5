"""One request from tp 2 to tp 1 between two processes: direct descriptors against staging."""

from __future__ import annotations

import os

from benchmarks.timing import show
from kvatlas import AtlasError
from kvatlas.models import Layer, Model
from kvatlas.planning import Plan, plan
from kvatlas.routing import scattered
from kvatlas.specs import FullAttention
from kvatlas.wire import How, Node, Session, make_transport, memory_of, pools_for
from kvatlas.wire.sample_server import SAMPLE_IDENTITY, SampleTask, run_sample_server

LAYERS, TOKENS, TURNS = 32, 4096, 5
TRANSPORTS = ("shm", "nixl", "mooncake")
ORDERS = (("LBHNC", "LBHNC"), ("BLHNC", "BHLNC"))
WAYS: tuple[How, ...] = ("direct", "staged", "auto")


def ends(source_order: str, destination_order: str) -> tuple[Plan, Plan]:
    spec = FullAttention(heads=8, head_dim=128)
    layers = tuple(Layer(name=f"layers.{i}.attn", index=i, spec=spec) for i in range(LAYERS))
    model = Model(
        name="dense", architecture="Dense", layers=layers, depth=LAYERS, attention_heads=32,
        max_len=TOKENS,
    )  # fmt: skip
    room = 2 * LAYERS * TOKENS * 512 * 4
    return (
        plan(model, memory=room, tp=2, layout=source_order),
        plan(model, memory=2 * room, layout=destination_order),
    )


def seconds(src: Plan, dst: Plan, transport: str) -> dict[str, tuple[float, int, int]]:
    """The best of several turns for each way, with its bytes and descriptors."""
    names = tuple(f"{way} {turn}" for way in WAYS for turn in range(TURNS))
    task = SampleTask(plan=src, transport=transport, seed=1, requests=names, tokens=TOKENS)
    near = make_transport(transport)
    pools = pools_for(dst, 0, near)
    best: dict[str, tuple[float, int, int]] = {}
    with (
        run_sample_server(task) as endpoints,
        Node(dst, memory=memory_of(pools), transport=near, identity=SAMPLE_IDENTITY) as node,
        Session(node, endpoints) as session,
    ):
        blocks = scattered(dst, TOKENS)
        for turn in range(TURNS):  # in turns, so that a busy moment meets all of them
            for way in WAYS:
                before = node.metrics.values["descriptors"]
                transfer = session.pull(
                    f"{way} {turn}",
                    destination_blocks=blocks,
                    tokens=TOKENS,
                    how=way,
                    timeout=120,
                ).wait()
                many = node.metrics.values["descriptors"] - before
                taken = min(transfer.seconds, best.get(way, (1e9, 0, 0))[0])
                best[way] = (taken, transfer.moved, many)
    return best


def main() -> None:
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    rows = []
    for source_order, destination_order in ORDERS:
        src, dst = ends(source_order, destination_order)
        for transport in TRANSPORTS:
            name = f"{source_order} -> {destination_order}, {transport}"
            try:
                best = seconds(src, dst, transport)
            except AtlasError as refusal:
                rows.append([name, str(refusal.code), "", "", "", ""])
                continue
            nbytes, many = best["direct"][1:]
            times = [f"{best[way][0] * 1e3:.0f}" for way in WAYS]
            rows.append([name, f"{nbytes / 1e6:.0f}", f"{many:,}", *times])
    show(
        f"tp 2 -> 1 of {LAYERS} layers, {TOKENS:,} tokens, blocks scattered, two processes",
        ["what", "MB", "descriptors", "direct ms", "staged ms", "auto ms"],
        rows,
    )


if __name__ == "__main__":
    main()
