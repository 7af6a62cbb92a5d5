"""The tier: storing and loading, beside a plain copy and a plain file of the same bytes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import median_ms, show
from kvatlas.copying.checksum import crc32
from kvatlas.copying.run_bounds import Bytes
from kvatlas.geometry import Placement
from kvatlas.models import Layer, Model
from kvatlas.planning import Plan, plan
from kvatlas.specs import FullAttention
from kvatlas.tier import Tier

LAYERS, HEADS, TOKENS, BLOCK = 32, 8, 1024, 16
REPEAT = 5


def dense() -> Model:
    spec = FullAttention(heads=HEADS, head_dim=128)
    layers = tuple(Layer(name=f"layers.{i}.attn", index=i, spec=spec) for i in range(LAYERS))
    return Model(
        name="dense",
        architecture="Dense",
        layers=layers,
        depth=LAYERS,
        attention_heads=32,
        max_len=TOKENS,
    )


def planned(tp: int, layout: str, times: float = 1.5) -> Plan:
    nbytes = LAYERS * TOKENS * 8 * 128 * 2 * 2 // tp
    return plan(dense(), memory=int(times * nbytes), tp=tp, layout=layout)


class Moved:
    """One request on one topology, with its blocks in no order."""

    def __init__(self, made: Plan) -> None:
        rng = np.random.default_rng(0)
        self.made = made
        self.table = rng.permutation(made.num_blocks)[: TOKENS // BLOCK]
        self.pools = [
            {0: rng.integers(0, 256, made.pools[0].nbytes, dtype=np.uint8)} for _ in range(made.tp)
        ]
        self.request: dict[str, Any] = {
            "blocks": self.table,
            "tokens": TOKENS,
            "keys": [b"%d" % block for block in range(TOKENS // BLOCK)],
        }

    def store(self, tier: Tier) -> None:
        """All ranks, all keys anew."""
        tier.drop(self.request["keys"])
        for rank, pools in enumerate(self.pools):
            stored = tier.store(pools, self.made, rank=rank, **self.request)
        if stored.whole != TOKENS // BLOCK:
            raise SystemExit(f"stored {stored}")

    def fetch(self, tier: Tier) -> None:
        """All ranks."""
        for rank, pools in enumerate(self.pools):
            tier.fetch(pools, self.made, rank=rank, **self.request)


def rate(nbytes: int, act: Callable[[], Any]) -> float:
    return nbytes / median_ms(act, REPEAT) / 1e6


def limits(tier: Plan, folder: Path) -> dict[str, float]:
    """What the machine does with as many bytes: block by block in memory, and into a file."""
    block, many = tier.pools[0].block_bytes, TOKENS // BLOCK
    data = np.random.default_rng(1).integers(0, 256, block * many, dtype=np.uint8)
    room = np.zeros(tier.pools[0].nbytes, dtype=np.uint8)
    order = np.random.default_rng(2).permutation(tier.pools[0].blocks)[:many].tolist()

    def copy() -> None:
        for n, at in enumerate(order):
            room[at * block : (at + 1) * block] = data[n * block : (n + 1) * block]

    fd = os.open(folder / "plain", os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(fd, 0, room.nbytes)

    def write(*, sync: bool) -> None:
        for n, at in enumerate(order):
            os.pwrite(fd, data[n * block : (n + 1) * block].data, at * block)
        if sync:
            os.fdatasync(fd)

    def read() -> None:
        for at in order:
            os.pread(fd, block, at * block)

    rates = {
        "copy": rate(data.nbytes, copy),
        "write": rate(data.nbytes, lambda: write(sync=False)),
        "write, synced": rate(data.nbytes, lambda: write(sync=True)),
        "read": rate(data.nbytes, read),
        "checksum": rate(data.nbytes, lambda: crc32(data.data)),
    }
    os.close(fd)
    return rates


class PlainGather:
    """The same bytes by numpy alone: one strided copy for each block and rank, then a write.

    That is what the order of a cache costs whoever stores it, without keys and checksums.
    """

    def __init__(self, moved: Moved, kept: Plan) -> None:
        made = moved.made
        placed = made.regions[0].placement(made.tp, made.num_blocks)
        self.boxes = [placed.reorder(*"BLHNC").view(pools[0]) for pools in moved.pools]
        self.table = moved.table.tolist()
        self.room = np.empty(self.boxes[0].shape[1:], np.uint8)
        whole, heads = kept.regions[0].placement(1, kept.num_blocks), HEADS // made.tp
        self.places = [
            [
                whole.select("B", block).narrow("H", rank * heads, heads).reorder(*"LHNC")
                for rank in range(made.tp)
            ]
            for block in range(len(self.table))
        ]
        """Where each rank's part of each block is kept."""

    def into_memory(self, memory: Bytes) -> Callable[[], None]:
        """Gathers into memory that is as a tier's is."""
        copies = [(place.view(memory), box[block])
                  for block, places in zip(self.table, self.places, strict=True)
                  for place, box in zip(places, self.boxes, strict=True)]  # fmt: skip

        def act() -> None:
            for there, here in copies:
                np.copyto(there, here)

        return act

    def into_file(self, file: int, *, sync: bool) -> Callable[[], None]:
        """Gathers, and writes what lies together in the file."""
        flat = self.room.reshape(-1).data
        copies = [(_stretches(place), box[block])
                  for block, places in zip(self.table, self.places, strict=True)
                  for place, box in zip(places, self.boxes, strict=True)]  # fmt: skip

        def act() -> None:
            for stretches, here in copies:
                np.copyto(self.room, here)
                done = 0
                for start, length in stretches:
                    os.pwrite(file, flat[done : done + length], start)
                    done += length
            if sync:
                os.fdatasync(file)

        return act


def _stretches(place: Placement) -> list[tuple[int, int]]:
    start, length = place.runs()
    return list(zip(start.tolist(), length.tolist(), strict=True))


def gathered(folder: Path, kept: Plan, ends: Mapping[str, Moved]) -> dict[str, dict[str, float]]:
    """What numpy makes of each order: in memory, into a file, and with the disk."""
    nbytes = TOKENS // BLOCK * kept.pools[0].block_bytes
    memory = np.zeros(kept.pools[0].nbytes, np.uint8)
    file = os.open(folder / "gathered", os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(file, 0, memory.nbytes)
    rates = {}
    for about, moved in ends.items():
        plain = PlainGather(moved, kept)
        rates[about] = {
            "memory": rate(nbytes, plain.into_memory(memory)),
            "file": rate(nbytes, plain.into_file(file, sync=False)),
            "durable file": rate(nbytes, plain.into_file(file, sync=True)),
        }
    os.close(file)
    return rates


def measure(
    name: str,
    tier: Tier,
    ends: Mapping[str, Moved],
    plain: tuple[float, float],
    gather: Mapping[str, Mapping[str, float]],
) -> Any:
    """Rows of the table; `plain` are the rates of writing and of reading as many bytes."""
    rows = []
    for about, moved in ends.items():
        nbytes = TOKENS // BLOCK * tier.plan.pools[0].block_bytes
        stored = rate(nbytes, partial(moved.store, tier))
        fetched = rate(nbytes, partial(moved.fetch, tier))
        limits = (plain[0], gather[about][name])
        shares = [text for one in limits for text in (f"{one:.2f}", f"{stored / one:.0%}")]
        read = [f"{fetched:.2f}", f"{plain[1]:.2f}", f"{fetched / plain[1]:.0%}"]
        rows.append([f"{name}, {about}", f"{stored:.2f}", *shares, *read])
    return rows


def main() -> None:
    kept = planned(1, "BLHNC", times=2)
    ends = {
        "BLHNC tp 1": Moved(planned(1, "BLHNC")),
        "LBNHC tp 1": Moved(planned(1, "LBNHC")),
        "LBHNC tp 2": Moved(planned(2, "LBHNC")),
        "LBNHC tp 2": Moved(planned(2, "LBNHC")),
    }
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        limit, gather = limits(kept, folder), gathered(folder, kept, ends)
        rows += measure("memory", Tier(kept), ends, (limit["copy"], limit["copy"]), gather)
        with Tier.open(folder / "t", kept, durable=False) as tier:
            rows += measure("file", tier, ends, (limit["write"], limit["read"]), gather)
        with Tier.open(folder / "t", kept) as tier:
            synced = (limit["write, synced"], limit["read"])
            rows += measure("durable file", tier, ends, synced, gather)
    nbytes = TOKENS // BLOCK * kept.pools[0].block_bytes / 1e6
    show(
        f"{TOKENS:,} tokens of {LAYERS} layers, {nbytes:.0f} MB, into blocks BLHNC and back",
        ["GB/s", "store", "plain", "", "gathered", "", "fetch", "plain", ""],
        rows,
    )
    print(
        "Plain: as many bytes block by block, copied in memory, or written to a file and read.\n"
        "Gathered: the same from the cache's own order, by numpy's strided copies.\n"
        "Runs are of 2 MB from BLHNC, 64 or 32 KB from LBHNC, 512 bytes from LBNHC.\n"
        f"A file also takes a checksum of each block: {limit['checksum']:.2f} GB/s on each core.\n"
    )


if __name__ == "__main__":
    main()
