"""Copies: between orders on the device, and to and from pinned memory with few programs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.cells import DEVICE, ORDERS, Cell, layers_of, shuffled, small
from benchmarks.gpu.replays import Case
from kvatlas.kernels.triton import BlockConversion, Staging, tune
from kvatlas.kernels.triton.launch_copy import between, zero_blocks
from kvatlas.specs import FullAttention, Mamba2, TensorScales

MIB = 1 << 20
MOVED = 1024
"""MiB that a copy on the device moves: as many as the plain copy beside it."""
LONG_LINK = 500.0
"""Milliseconds that the link is timed: others use the host's memory too, now and then."""
PAGES = {16: 2, 32: 4, 64: 8}
"""KiB of a page of 16 states, and its heads of 128."""


def on_device(source: str, target: str, kib: int, layers: int, choice: dict[str, Any]) -> Case:
    """Scattered blocks from one pool to another, `layers` of them in one launch."""
    moved = (16 if small() else MOVED) * 1024 // kib // layers
    spec = FullAttention(heads=PAGES[kib], head_dim=128)
    first, second = (
        layers_of(spec, order, block=16, blocks=2 * moved) for order in (source, target)
    )
    first[0].buffer.random_()
    ids, places = shuffled(moved, 2 * moved, 1), shuffled(moved, 2 * moved, 2)
    copy = between(first[:layers], second[:layers])

    def right() -> bool:
        second[0].buffer.fill_(0xA5)
        copy(ids, places, **choice)
        left = torch.ones(2 * moved, dtype=torch.bool, device=DEVICE)
        left[places.long()] = False
        return all(
            bool((b.tensor[places.long()] == a.tensor[ids.long()]).all())
            and bool((b.tensor[left] == 0xA5).all())
            for a, b in zip(first[:layers], second[:layers], strict=True)
        ) and bool((second[-1].tensor == 0xA5).all() or layers == len(second))

    return Case([lambda: copy(ids, places, **choice)], 2 * moved * copy.block_bytes, right)


def converting(
    one: str, two: str, orders: tuple[str, str], layers: int, choice: dict[str, Any]
) -> Case:
    """Scattered pages of 16 states and 8 heads into pages of another format, in one launch."""
    ends = [
        FullAttention(heads=8, head_dim=128, cache="fp8" if name == "fp8" else "auto")
        for name in (one, two)
    ]
    pages = [spec.page(16).nbytes for spec in ends]
    moved = (16 if small() else MOVED) * MIB // max(pages) // layers
    first, second = (
        layers_of(spec, order, block=16, blocks=2 * moved)
        for spec, order in zip(ends, orders, strict=True)
    )
    for layer in first:
        for view in layer.fields.values():
            view.copy_(torch.randn(view.shape[1:], device=DEVICE).to(view.dtype))
    ids, places = shuffled(moved, 2 * moved, 1), shuffled(moved, 2 * moved, 2)
    scales = [TensorScales(0.5, 0.5)] * layers
    convert = BlockConversion(
        first[:layers], second[:layers],
        source_scales=scales if one == "fp8" else (),
        destination_scales=scales if two == "fp8" else (),
    )  # fmt: skip
    factor = 0.5 if one == "fp8" else 2.0

    def right() -> bool:
        second[0].buffer.fill_(0xA5)
        convert(ids, places, **choice)
        left = torch.ones(2 * moved, dtype=torch.bool, device=DEVICE)
        left[places.long()] = False
        for a, b in zip(first[:layers], second[:layers], strict=True):
            for name in ("k", "v"):
                axes = [a.place(name).axes.index(axis) for axis in b.place(name).axes]
                wanted = a.field(name).permute(axes)[ids.long()].float() * factor
                stored = wanted.to(b.field(name).dtype)
                if not torch.equal(b.field(name)[places.long()].float(), stored.float()):
                    return False
            if not bool((b.tensor[left] == 0xA5).all()):
                return False
        return True

    return Case([lambda: convert(ids, places, **choice)], moved * layers * sum(pages), right)


def to_or_from_host(
    order: str, other: str, kib: int, to_host: bool, choice: dict[str, Any]
) -> Case:
    """Scattered pages of one layer between a pool and a pinned one, by a kernel."""
    moved = (16 if small() else 256) * 1024 // kib
    spec = FullAttention(heads=PAGES[kib], head_dim=128)
    there = layers_of(spec, order, block=16, blocks=2 * moved, slots=2)
    here = layers_of(spec, other, block=16, blocks=moved + 8, device="cpu", slots=2)
    there[0].buffer.random_()
    here[0].buffer.copy_(there[0].buffer[: here[0].buffer.numel()])
    far, near = shuffled(moved, 2 * moved, 1), shuffled(moved, moved + 8, 2)
    copy = between(there[0], here[0]) if to_host else between(here[0], there[0])
    ids, places = (far, near) if to_host else (near, far)

    def right() -> bool:
        (here if to_host else there)[0].buffer.fill_(0xA5)
        copy(ids, places, **choice)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        # The device compares: the host would take longer than all the rest.
        brought = replace(here[0], buffer=here[0].buffer.to(DEVICE))
        mine = there[0].tensor[far.long()]
        return torch.equal(brought.tensor[near.long()], mine) and bool((mine != 0xA5).any())

    return Case([lambda: copy(ids, places, **choice)], moved * copy.block_bytes, right)


def staged(order: str, kib: int, to_host: bool, choice: dict[str, Any]) -> Case:
    """The same pages of four layers by way of a staging buffer and one transfer."""
    moved = (16 if small() else 256) * 1024 // kib // 4
    spec = FullAttention(heads=PAGES[kib], head_dim=128)
    layers = layers_of(spec, order, block=16, blocks=2 * moved)
    layers[0].buffer.random_()
    ids = shuffled(moved, 2 * moved, 1)
    staging = Staging(layers, moved)
    rows = torch.empty(moved, staging.row_bytes, dtype=torch.uint8, pin_memory=DEVICE == "cuda")

    def call() -> None:
        if to_host:
            staging.store(ids, rows, **choice)
        else:
            staging.load(rows, ids, **choice)

    def right() -> bool:
        before = [layer.tensor[ids.long()].clone() for layer in layers]
        rows.fill_(0xA5)
        staging.store(ids, rows, **choice)
        layers[0].buffer.fill_(0xA5)
        staging.load(rows, ids, **choice)
        torch.cuda.synchronize()
        return all(
            torch.equal(layer.tensor[ids.long()], one)
            for layer, one in zip(layers, before, strict=True)
        )

    return Case([call], rows.numel(), right)


def states(order: str, other: str, zero: bool, choice: dict[str, Any]) -> Case:
    """Pages of a recurrent layer: copied between orders, or cleared."""
    spec = Mamba2(heads=64, head_dim=64, groups=8, state_size=128)
    page = spec.page(16).nbytes
    moved = (16 if small() else MOVED) * MIB // page
    first, second = (
        layers_of(spec, one, block=16, blocks=moved + moved // 2) for one in (order, other)
    )
    first[0].buffer.random_()
    ids, places = (shuffled(moved, moved + moved // 2, seed) for seed in (1, 2))
    copy = between(first[1], second[1])

    def call() -> None:
        if zero:
            zero_blocks(second[1], places, **choice)
        else:
            copy(ids, places, **choice)

    def right() -> bool:
        second[0].buffer.fill_(0xA5)
        call()
        mine = second[1].tensor[places.long()]
        wanted = torch.zeros_like(mine) if zero else first[1].tensor[ids.long()]
        return torch.equal(mine, wanted) and bool((second[2].tensor == 0xA5).all())

    return Case([call], (1 if zero else 2) * moved * page, right)


def cells() -> list[Cell]:
    """36 pairs of orders in each size, several layers at once, and the host link."""
    table = [
        Cell(
            f"copy on the device, {kib} KiB pages", f"{source} to {target}",
            partial(on_device, source, target, kib, 1), bar=0.9,
        )
        for kib in PAGES
        for source in ORDERS
        for target in ORDERS
    ]  # fmt: skip
    table += [
        Cell(
            "copy of 4 layers in one launch, 32 KiB pages", f"{source} to {target}",
            partial(on_device, source, target, 32, 4), bar=0.9,
        )
        for source, target in (("LBNHC", "BLHNC"), ("BHLNC", "LBHNC"), ("BLNHC", "BLNHC"))
    ]  # fmt: skip
    table += [
        Cell(
            f"converting on the device, {one} to {two}", f"{source} to {target}, {layers} layers",
            partial(converting, one, two, (source, target), layers), bar=0.8,
        )
        for one, two in (("bf16", "fp8"), ("fp8", "bf16"))
        for source, target in (("LBNHC", "LBNHC"), ("LBNHC", "BHLNC"), ("BHLNC", "LBNHC"))
        for layers in (1, 4)
    ]  # fmt: skip
    table += [
        Cell("copy of Mamba2 states", f"{one} to {other}", partial(states, one, other, False))
        for one, other in (("LBNHC", "LBNHC"), ("BLNHC", "LBHNC"))
    ]
    table.append(
        Cell("clearing of Mamba2 states", "BLNHC", partial(states, "BLNHC", "BLNHC", True))
    )
    held = tune.choose("copy_host", torch.device(DEVICE))["programs"]
    for to_host in (True, False):
        way, link = ("to the host", "to host") if to_host else ("from the host", "from host")
        table += [
            Cell(
                f"copy {way}, {kib} KiB pages, {held} programs", f"{order} to {other}",
                partial(to_or_from_host, order, other, kib, to_host), ceiling=link, bar=0.92,
                long=LONG_LINK,
            )
            for kib in PAGES
            for order, other in [*((order, order) for order in ORDERS), ("LBNHC", "BHLNC")]
        ]  # fmt: skip
        table += [
            Cell(
                f"copy {way} by staging, {kib} KiB pages", order,
                partial(staged, order, kib, to_host), ceiling=link, bar=0.92,
            )
            for kib in PAGES
            for order in ("LBNHC", "BHLNC")
        ]  # fmt: skip
    return table
