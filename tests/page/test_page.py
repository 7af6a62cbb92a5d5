"""The page in a real browser: what hovers say is true in memory, routes are as they are bound."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvatlas
from kvatlas.cache import Cache, allocate
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import ENGINE_LAYOUTS
from kvatlas.geometry.address_arrays import join_ranges
from kvatlas.planning import Plan, plan
from kvatlas.routing import route
from tests.page.browser import Browser
from tests.planning.test_foreign_fields import LAYOUTS, Arena, described

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen3-8B", {"memory": "48MiB", "tp": 2}),
    "sliding": ("gpt-oss-20b", {"memory": "32MiB"}),
    "latent": ("DeepSeek-V2-Lite", {"memory": "32MiB"}),
    "hybrid": ("Qwen3.5-35B-A3B", {"memory": "128MiB", "tp": 2}),
    "hybrid of vLLM": ("Qwen3.5-35B-A3B", {"memory": "128MiB", "tp": 2, "policy": "vllm"}),
    "compressed": ("DeepSeek-V4-Flash", {"memory": "64MiB"}),
    "int4": ("Qwen3-8B", {"memory": "32MiB", "kv_dtype": "int4_per_token_head"}),
    "nvfp4": ("Qwen3-8B", {"memory": "32MiB", "kv_dtype": "nvfp4"}),
    "fp8": ("gpt-oss-20b", {"memory": "32MiB", "tp": 4, "kv_dtype": "fp8"}),
}
FEWER_ORDERS = {("DeepSeek-V4-Flash", None): 2}
"""Orders that backends take, where they are not all six."""
ROUTES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("Qwen3-8B", {"tp": 2, "layout": "BLHNC"}, {"tp": 4, "layout": "BHLNC"}),
    "tp-sliced": (
        "Qwen3-8B",
        {"tp": 4, "layout": "LHBNC"},
        {"pp": 2, "block_size": 32, "layout": "LBHNC"},
    ),
    "sliding": ("gpt-oss-20b", {"layout": "LBHNC"}, {"tp": 2, "layout": "LHBNC"}),
    "latent": ("DeepSeek-V2-Lite", {"layout": "LBNHC"}, {"tp": 2, "layout": "BLNHC"}),
    "hybrid": ("Qwen3.5-35B-A3B", {"tp": 2}, {"tp": 1, "layout": "BHLNC"}),
    "compressed": ("DeepSeek-V4-Flash", {}, {"tp": 2, "layout": "BLNHC"}),
    "int4": (
        "Qwen3-8B",
        {"tp": 2, "kv_dtype": "int4_per_token_head", "layout": "BHLNC"},
        {"kv_dtype": "int4_per_token_head", "layout": "LBNHC"},
    ),
    "nvfp4": (
        "Qwen3-8B",
        {"tp": 2, "kv_dtype": "nvfp4", "layout": "BLNHC"},
        {"kv_dtype": "nvfp4", "layout": "BLHNC"},
    ),
}
"""A model and what either end of the route has of its own; every order is at both ends."""
TO = " \N{EN DASH} "
POINTS = 60
"""Points of each kind that are hovered, as many in each of its orders."""


def orders(name: str, options: dict[str, Any]) -> list[Plan]:
    made = []
    for layout in ENGINE_LAYOUTS:
        try:
            made.append(plan(name, max_len=64, in_flight=16, layout=layout.order, **options))
        except AtlasError as refusal:
            assert refusal.code is Code.LAYOUT_REFUSED
    assert len(made) == FEWER_ORDERS.get((name, options.get("kv_dtype")), 6) or "policy" in options
    return list(dict.fromkeys(made))


def show(browser: Browser, tmp_path: Path, *args: Plan, **options: Any) -> None:
    browser.open(kvatlas.map(*args, **options).save(tmp_path / "map.html"))


def somewhere(browser: Browser, dice: random.Random) -> dict[str, str]:
    """Go to a level, block, group and rank by chance, and point at a byte there."""
    found: list[float] | None = browser.do(
        """
        const dice = arguments[0], mine = plan();
        const regions = mine.regions, region = regions[Math.floor(dice[0] * regions.length)];
        const tpRank = Math.floor(dice[1] * mine.tp), { group, stage } = region;
        const block = Math.floor(dice[2] * poolOf(mine, { group, stage }).blocks);
        const index = Math.floor(dice[3] * region.layers.length);
        const level = ["pool", "block", "page"][Math.floor(dice[4] * 3)];
        go({ group, stage, tpRank, level, block, region, index });
        const row = Math.floor(dice[5] * drawn.rows.length);
        const y = row * drawn.place.height + drawn.place.top + 2;
        const wide = drawn.rows[row].nbytes * drawn.place.scale;
        const x = drawn.place.left + Math.floor(dice[6] * wide);
        if (dice[7] < 0.3 && pointAt(x, y).kind === "field") {
          if (view.level === "pool") goIn(pointAt(x, y));
          if (view.level === "block") goIn(pointAt(x, y));
          const wide = drawn.rows[0].nbytes * drawn.place.scale;
          return [drawn.place.left + Math.floor(dice[8] * wide), drawn.place.top + 2];
        }
        return [x, y];
        """,
        [dice.random() for _ in range(9)],
    )
    assert found
    # The page is as high as its picture, so only now is it known where that lies.
    scroll = "scrollTo(0, scrollY + picture.getBoundingClientRect().top + arguments[0]);"
    box = browser.do(scroll + "return picture.getBoundingClientRect().toJSON()", found[1] - 300)
    return browser.hover(box["left"] + found[0] + 0.25, box["top"] + found[1])


def number(text: str) -> int:
    return int(re.sub(r"[^\d].*", "", text.replace(",", "")))


def element(cache: Cache, said: dict[str, str]) -> tuple[torch.Tensor, tuple[int, ...], int]:
    """The bound view, the place in it that the page describes, and the pool."""
    name, _, part = said["layer"].partition(", part ")
    layer = cache.parts(name)[int(part or 0)]
    field = layer.page.field(said["field"].split(",")[0])
    placed = layer.place(field.name)
    at = {axis: int(n) for axis, n in re.findall(r"(\w+) (\d+)", said.get("element", ""))}
    if "head" in said or "row" in said:
        axis = field.sharding.axis or "H"
        at[axis] = local_row(field.ranges, number(said.get("head") or said["row"]))
    blocks = layer.placement.size("k") if "k" in layer.placement.axes else 1
    at["B"] = number(said["block"]) * blocks
    if "N" in placed.axes:
        state = number(said["token"]) // (layer.spec.tokens_per_state or 1)
        at["B"] += state // placed.size("N")
        at["N"] = state % placed.size("N")
    assert number(said["tp rank"]) == cache.tp_rank
    pool = cache.plan.groups[cache.plan.region_of(name, int(part or 0))[0].group].pool
    return layer.field(field.name), tuple(at[axis] for axis in placed.axes), pool


def strides(cache: Cache, said: dict[str, str]) -> dict[str, int]:
    """How far the next element lies along every axis, by the addresses of bound views."""
    name, _, part = said["layer"].partition(", part ")
    region, index = cache.plan.region_of(name, int(part or 0))
    layer, field = cache.parts(name)[int(part or 0)], said["field"].split(",")[0]
    tensor, place, _ = element(cache, said)
    axes = layer.place(field).axes
    blocks, count = region.block // region.kernel_block, dict(zip(axes, tensor.shape, strict=True))
    steps = {axis: (axis, 1, size) for axis, size in count.items()}
    steps |= {"B": ("B", blocks, count["B"]), "k": ("B", 1, blocks)}  # views count kernel blocks
    found = {}
    for axis, (counted, step, size) in steps.items():
        if size > step:
            there, n = list(place), axes.index(counted)
            there[n] += step if place[n] % size + step < size else -step
            found[axis] = abs(tensor[tuple(there)].data_ptr() - tensor[place].data_ptr())
    if len(region.layers) > 1:
        other = index + 1 if index + 1 < len(region.layers) else index - 1
        page = cache.parts(region.layers[other].name)[region.part(other)].field(field)
        found["L"] = abs(page[place].data_ptr() - tensor[place].data_ptr())
    return found


def local_row(ranges: Any, row: int) -> int:
    for held in ranges:
        if held.start <= row < held.start + held.length:
            return int(held.local + row - held.start)
    return row


def check_point(caches: dict[int, Cache], said: dict[str, str], tp_rank: int, group: int) -> str:
    """Hold what the page says of a byte against memory; what kind of byte it was."""
    cache = caches[tp_rank]
    if "field" not in said:
        pool = cache.pools[cache.plan.groups[group].pool]
        regions = [region for region in cache.plan.regions if region.group == group]
        for region in regions:
            for index, layer in enumerate(region.layers):
                for tensor in cache.parts(layer.name)[region.part(index)].fields.values():
                    tensor.copy_(torch.ones((), dtype=torch.float32))
        assert int(pool[number(said["address"])]) == 0, said
        pool.zero_()
        return "padding"
    tensor, place, index = element(cache, said)
    first, last = (int(text.replace(",", "")) for text in said["bytes"].split(TO))
    assert first <= number(said["address"]) <= last
    tensor[place] = torch.ones((), dtype=torch.float32).to(tensor.dtype)
    pool = cache.pools[index]
    assert pool[first : last + 1].any(), said
    pool[first : last + 1] = 0
    assert not pool.view(torch.int64).any(), said  # the mark is nowhere else
    assert last - first + 1 == tensor.element_size()
    told = re.findall(r"(\w+)\xa0([\d,]+)", said["stride"])
    assert {axis: number(text) for axis, text in told} == strides(cache, said), said
    return said["field"].split(",")[0]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_hover_says_is_found_in_memory(browser: Browser, tmp_path: Path, kind: str) -> None:
    name, options = KINDS[kind]
    made = orders(name, options)
    show(browser, tmp_path, made[0], others=made[1:])
    dice, kinds = random.Random(kind), set()  # noqa: S311
    for index, one in enumerate(made):
        browser.do("change({ plan: arguments[0] })", index)
        caches = {rank: allocate(one, rank=rank, device="cpu") for rank in range(one.tp)}
        for cache in caches.values():
            for pool in cache.pools.values():
                pool.zero_()
        for _ in range(POINTS // len(made)):
            said = somewhere(browser, dice)
            rank, group = browser.do("return [view.tpRank, view.group]")
            kinds.add(check_point(caches, said, rank, group))
    assert kinds - {"padding"}
    assert browser.complaints() == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hovers_find_fields_that_are_stored_apart(
    browser: Browser, tmp_path: Path, layout: str
) -> None:
    """The bytes of other engines' fields are where their tensors have them."""
    model, make = LAYOUTS[layout]
    made = described(model, make(Arena()))
    show(browser, tmp_path, made)
    dice, fields = random.Random(layout), set()  # noqa: S311
    for _ in range(POINTS // 3):
        said = somewhere(browser, dice)
        name = said["field"].split(",")[0]
        view = made.view(said["layer"], name)
        at = {axis: int(n) for axis, n in re.findall(r"(\w+) (\d+)", said["element"])}
        at["B"] = number(said["block"])
        if "head" in said:
            at["H"] = number(said["head"])
        if "N" in view.axes:
            at["k"], at["N"] = divmod(number(said["token"]), view.size("N"))
        start = int(view(**{axis: at[axis] for axis in view.axes}))
        first, last = (int(text.replace(",", "")) for text in said["bytes"].split(TO))
        assert (first, last) == (start, start + view.item - 1), said
        assert first <= number(said["address"]) <= last
        strides = {axis: number(n) for axis, n in re.findall(r"(\w+)\xa0([\d,]+)", said["stride"])}
        found = {axis: view.stride(axis) for axis in strides if axis != "L"}
        assert found == {axis: step for axis, step in strides.items() if axis != "L"}
        fields.add(name)
    assert fields >= {field for field in ("k", "v", "conv", "ssm") if field in view_names(made)}
    assert browser.complaints() == []


def view_names(made: Plan) -> set[str]:
    return {field.name for field in made.page(made.layers[0]).fields if not field.padding}


def expected_runs(made: Plan, group: int, chosen: dict[str, Any], names: list[str]) -> list[int]:
    """Lengths of the runs that hold what is chosen of block 0 on rank 0, by `Placement`."""
    starts, lengths = [], []
    for region in made.regions:
        if region.group != group or region.stage:
            continue
        for index, layer in enumerate(region.layers):
            if "layer" in chosen and layer.name != names[chosen["layer"]]:
                continue
            page = region.page(made.tp, 0, index)
            for field in page.fields:
                view = made.view(layer.name, field.name, region.part(index)).select("B", 0)
                if field.padding or ("heads" in chosen and "H" not in view.axes):
                    continue
                if "heads" in chosen:
                    rows = range(chosen["heads"][0], chosen["heads"][1] + 1)
                    held = [local_row(field.ranges, row) for row in rows if holds(field, row)]
                    if not held:
                        continue
                    view = view.narrow("H", held[0], len(held))
                if "token" in chosen:
                    if "N" not in view.axes:
                        continue
                    view = view.narrow("N", 0, 1)
                    view = view.narrow("k", 0, 1) if "k" in view.axes else view
                begin, length = view.runs()
                starts.append(begin)
                lengths.append(length)
    return list(join_ranges(np.concatenate(starts), np.concatenate(lengths))[1])


def holds(field: Any, row: int) -> bool:
    return not field.ranges or any(h.start <= row < h.start + h.length for h in field.ranges)


def test_runs_of_a_transfer_are_those_of_placements(browser: Browser, tmp_path: Path) -> None:
    for kind in ("dense", "hybrid", "compressed", "int4"):
        name, options = KINDS[kind]
        made = orders(name, options)
        drawn = kvatlas.map(made[0], others=made[1:])
        browser.open(drawn.save(tmp_path / "map.html"))
        for index, one in enumerate(made):
            browser.do("change({ plan: arguments[0], tpRank: 0, block: 0, group: 0 })", index)
            told = browser.do(
                """
                return [...document.querySelectorAll("#transfer tr[data-chosen]")].map((row) => {
                  const chosen = JSON.parse(row.dataset.chosen);
                  const boxes = boxesOf(plan(), 0, 0, 0, chosen), found = runsOf(chosen);
                  const lengths = joinRuns(boxes).map((run) => run[1]);
                  const sizes = [found.least, found.most];
                  return [chosen, lengths, sizes, row.children[1].textContent];
                });
                """
            )
            assert len(told) >= 2
            for chosen, lengths, sizes, text in told:
                expected = expected_runs(one, 0, chosen, list(drawn.data.names))
                assert lengths == expected, (kind, one.layout, chosen)
                assert sizes == [min(expected), max(expected)]
                assert int(text.replace(",", "")) == len(expected)


def point_at_bands(browser: Browser, dice: random.Random) -> list[str]:
    """What is said of runs: of each end in words, for some points of the drawn bands."""
    return list(
        browser.do(
            """
            const canvas = byId("bands"), told = [];
            for (const [across, down] of arguments[0]) {
              const box = canvas.getBoundingClientRect();
              canvas.dispatchEvent(new MouseEvent("mousemove", {
                clientX: box.left + columns.side + across * (columns.width - 2 * columns.side),
                clientY: box.top + columns.top + down * (box.height - columns.top),
              }));
              told.push(byId("run-facts").innerText);
            }
            return told;
            """,
            [[dice.random(), dice.random()] for _ in range(40)],
        )
    )


def common_words(text: str) -> list[str]:
    """What both ends of a run must agree on."""
    return re.findall(r"(layer [\w ]+|head \d+)", text)


def test_every_order_is_routed_from_and_to() -> None:
    known = {layout.order for layout in ENGINE_LAYOUTS}
    assert known <= {src.get("layout") for _, src, _ in ROUTES.values()}
    assert known <= {dst.get("layout") for _, _, dst in ROUTES.values()}


@pytest.mark.parametrize("kind", ROUTES)
def test_bands_are_the_runs_that_are_bound(browser: Browser, tmp_path: Path, kind: str) -> None:
    name, *ends = ROUTES[kind]
    size: dict[str, Any] = {"memory": "256MiB", "max_len": 64, "in_flight": 16}
    src, dst = (plan(name, **size | end) for end in ends)
    drawn = kvatlas.map(src, dst)
    browser.open(drawn.save(tmp_path / "map.html"))
    assert drawn.data.route
    tables, dice, seen = drawn.data.route.tables, random.Random(kind), set()  # noqa: S311
    rows = browser.do("return document.querySelectorAll('#pairs tr').length - 1")
    assert rows == len(drawn.data.route.check["pairs"])
    for number_of, pair in enumerate(drawn.data.route.pairs):
        browser.do("document.querySelectorAll('#pairs tr')[arguments[0] + 1].click()", number_of)
        browser.do("[...byId('shown').querySelectorAll('button, option')].pop().click()")
        bound = route(src, dst).bind(
            source_rank=pair.source_rank,
            destination_rank=pair.destination_rank,
            source_blocks=tables[0],
            destination_blocks=tables[1],
            tokens=drawn.data.route.tokens,
        )
        runs = {
            run
            for c in bound.copies
            for run in zip(
                c.source.tolist(), c.destination.tolist(), c.length.tolist(), strict=True
            )
        }
        for text in point_at_bands(browser, dice):
            found = re.findall(rf"bytes ([\d,]+){TO}([\d,]+)", text)
            if not found:
                continue
            (a, b), (c, d) = [[int(n.replace(",", "")) for n in pair] for pair in found]
            assert (a, c, b - a + 1) in runs, text
            assert b - a == d - c
            start, stop = text.split("\n")[1:]
            assert common_words(start) == common_words(stop), text
            seen.add((number_of, a, c))
    assert len(seen) > 15, len(seen)
    assert browser.complaints() == []
