"""Maps without a browser: rows, lookups, the page's data, pictures and text."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import kvatlas
from kvatlas.cli.draw import draw
from kvatlas.cli.options import PlanOptions
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import ENGINE_LAYOUTS
from kvatlas.maps.address_lookup import look_up
from kvatlas.maps.block_picture import sampled_groups
from kvatlas.maps.plan_drawing import Box, draw_plan
from kvatlas.maps.route_drawing import MOST_RUNS
from kvatlas.planning import Plan, plan
from kvatlas.routing import check, route
from tests.page.large_plan import large_plan
from tests.planning.models import SMALL
from tests.planning.test_engine_memory import ROWS, made_of
from tests.routing.fields_apart import apart

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("Qwen3-8B", {"tp": 2}),
    ("gpt-oss-20b", {}),
    ("DeepSeek-V2-Lite", {}),
    ("Qwen3.5-35B-A3B", {"tp": 2}),
    ("Qwen3.5-397B-A17B", {"tp": 2, "policy": "vllm"}),
    ("DeepSeek-V4-Flash", {}),
    ("Qwen3-8B", {"kv_dtype": "int4_per_token_head"}),
    ("Qwen3-8B", {"kv_dtype": "nvfp4"}),
    ("Gemma-3-27B", {"tp": 2}),
]


@cache
def plans() -> list[Plan]:
    """Every kind in every order that it can have."""
    made = []
    for name, options in KINDS:
        for layout in ENGINE_LAYOUTS:
            try:
                made.append(plan(name, memory="40GiB", layout=layout.order, **options))
            except AtlasError as refusal:
                assert refusal.code is Code.LAYOUT_REFUSED
    assert len(made) >= 36
    return made


def test_rows_and_what_is_unused_are_all_bytes_of_a_block() -> None:
    for made in plans():
        drawn = draw_plan(made, {})
        for key, left in drawn.unused.items():
            stage, group = map(int, key.split("/"))
            nbytes = sum(box.item for box in left)
            for region in drawn.regions:
                if (region.stage, region.group) == (stage, group):
                    (rows,) = drawn.pages[region.page].block_rows
                    nbytes += rows.item * math.prod(n for axis, n, _ in rows.axes if axis != "B")
            pool = made.pools_by_stage[stage, made.groups[group].pool]
            assert nbytes == pool.block_bytes, (made, key)


def test_rows_of_a_page_are_all_bytes_of_the_page() -> None:
    for made in plans():
        drawn = draw_plan(made, {})
        for region, own in zip(made.regions, drawn.regions, strict=True):
            boxes = drawn.pages[own.page].page_rows
            outside = [[n for axis, n, _ in box.axes if axis not in ("B", "L")] for box in boxes]
            rows = sum(box.item * math.prod(n) for box, n in zip(boxes, outside, strict=True))
            assert rows == region.page_bytes, (made, region.group)


@cache
def plans_of_fields() -> list[Plan]:
    """Memory of other engines, and of none, whose fields are stored apart."""
    engines = [made_of(row).described() for row in ROWS]
    drawn = [
        apart(plan(SMALL[name], memory="1MiB", max_len=64), seed)
        for name in ("dense", "sliding", "latent", "delta hybrid", "mamba hybrid")
        for seed in range(4)
    ]
    found = [made for made in engines + drawn if any(region.apart for region in made.regions)]
    assert len(found) > 45
    return found


def every_byte(box: Box, **at: int) -> np.ndarray:
    """The addresses of all bytes of a box at some coordinates."""
    found = np.arange(box.item)
    for axis, size, stride in box.axes:
        steps = np.array([at[axis]]) if axis in at else np.arange(size)
        found = np.add.outer(steps * stride, found).ravel()
    return found + box.offset


def test_rows_of_fields_are_their_bytes_in_each_block_and_page() -> None:
    """Each byte of a field is in one row, and rows have no other bytes."""
    for made in plans_of_fields():
        drawn = draw_plan(made, {})
        for region, own in zip(made.regions, drawn.regions, strict=True):
            page, names = drawn.pages[own.page], [layer.name for layer in region.layers]
            if not region.apart:
                continue
            fields = [field.name for field in page.fields]
            for block in (0, made.pool_of(names[0]).blocks - 1):
                for rows, at in ((page.block_rows, {}), (page.page_rows, {"L": len(names) - 1})):
                    shown = names[at.get("L", 0) :]
                    views = [made.view(name, field) for name in shown for field in fields]
                    runs = [view.select("B", block).runs() for view in views]
                    held = [
                        np.arange(start, start + nbytes)
                        for own_runs in runs
                        for start, nbytes in zip(*own_runs, strict=True)
                    ]
                    painted = [every_byte(box, B=block, **at) for box in rows]
                    assert np.array_equal(
                        np.sort(np.concatenate(painted)), np.sort(np.concatenate(held))
                    ), (made, names)


def test_pictures_show_every_field_that_is_stored_apart() -> None:
    for made in plans_of_fields():
        shown = kvatlas.map(made)
        ET.fromstring(shown.svg())  # noqa: S314
        for group in sampled_groups(draw_plan(made, {}), made.layers, 400, piece_columns=1):
            pages = {id(row.page): row.page for row in group.rows if row.page}
            fields = {field.name for page in pages.values() for field in page.fields}
            seen = {
                row.page.fields[number].name
                for row in group.rows
                if row.page
                for number in set(row.field.tolist()) - {-1}
            }
            assert seen == fields, made


def test_an_address_is_looked_up_to_the_coordinates_that_are_placed_there() -> None:
    random = np.random.default_rng(0)
    for made in [*plans(), *plans_of_fields()]:
        drawn = draw_plan(made, {})
        for region in drawn.regions[:6]:
            page = drawn.pages[region.page]
            layer = int(random.integers(len(region.layers)))
            names = [layer.name for layer in made.regions[drawn.regions.index(region)].layers]
            part = region.parts[layer] if region.parts else 0
            for number, field in enumerate(page.fields):
                view = made.view(names[layer], field.name, part)
                at = {
                    axis: random.integers(n, size=20)
                    for axis, n in zip(view.axes, view.sizes, strict=True)
                }
                inside = random.integers(view.item, size=20)
                found = look_up(page, view(**at) + inside)
                assert (found.field == number).all()
                assert (found.coordinates["L"] == layer).all()
                for axis, index in at.items():
                    assert (found.coordinates[axis] == index).all(), (made, field.name, axis)


def test_pages_of_large_models_are_under_a_megabyte_and_need_no_network() -> None:
    for name in ("Qwen3.5-397B-A17B", "Kimi-K3", "DeepSeek-V4-Pro", "Llama-3.1-405B"):
        made = [plan(name, memory="400GiB", tp=tp) for tp in (1, 8)]
        page = kvatlas.map(made[0], made[1], others=made, tokens=256).html()
        assert len(page.encode()) < 1_000_000
        assert "http://" not in page
        assert "https://" not in page


def test_a_models_name_cannot_write_the_page() -> None:
    made = plan("Qwen3-8B", memory="4GiB", max_len=512)
    hostile = "</script><script>alert(1)</script><!--DATA-->"
    drawn = kvatlas.map(msgspec.structs.replace(made, model=hostile))
    for text in (drawn.html(), drawn.svg(), drawn._repr_html_()):
        assert "<script>alert" not in text
    ET.fromstring(drawn.svg())  # noqa: S314


def test_a_route_is_drawn_as_it_is_bound() -> None:
    src = plan("Qwen3-8B", memory="8GiB", tp=2, layout="LBNHC")
    dst = plan("Qwen3-8B", memory="8GiB", layout="BHLNC", block_size=32)
    data = kvatlas.map(src, dst).data
    assert data.route
    assert data.route.check == check(src, dst).as_dict()
    tables = data.route.tables
    for pair in data.route.pairs:
        bound = route(src, dst).bind(
            source_rank=pair.source_rank,
            destination_rank=pair.destination_rank,
            source_blocks=tables[0],
            destination_blocks=tables[1],
            tokens=data.route.tokens,
        )
        columns = [
            (c.source_pool, c.destination_pool, c.source, c.destination, c.length)
            for c in bound.copies
        ]
        runs = {
            (a, b, int(s), int(d), int(n))
            for a, b, *runs in columns
            for s, d, n in zip(*runs, strict=True)
        }
        assert set(pair.runs) == runs
        assert (pair.counted, pair.nbytes) == (len(bound), bound.nbytes)


def test_many_runs_are_sampled_and_counted() -> None:
    src = plan("Llama-3.1-405B", memory="40GiB", layout="LBNHC", block_size=64)
    dst = plan("Llama-3.1-405B", memory="40GiB", layout="BHLNC", block_size=64)
    data = kvatlas.map(src, dst, tokens=64).data
    assert data.route
    (pair,) = data.route.pairs
    assert len(pair.runs) <= MOST_RUNS < pair.counted
    assert sum(pair.sizes.values()) == pair.counted


def test_unlike_plans_are_drawn_with_the_reasons() -> None:
    src = plan("Qwen3-8B", memory="4GiB", max_len=512)
    data = kvatlas.map(src, plan("Qwen3-8B", memory="4GiB", max_len=512, kv_dtype="fp8")).data
    assert data.route
    assert not data.route.pairs
    assert data.route.check["reasons"][0]["code"] == "unlike_dtypes"


def test_a_plan_of_very_many_layers_and_blocks_is_a_page_under_a_megabyte() -> None:
    for order in ("LBNHC", "BHLNC"):
        drawn = kvatlas.map(large_plan(order))
        assert len(drawn.html()) < 1_000_000
        assert len(drawn.svg()) < 500_000
        assert len(drawn.text().splitlines()) < 30


def test_text_is_read_in_80_columns_and_shows_heads() -> None:
    for order, row in (("BHLNC", "000000"), ("LBNHC", "001122")):
        made = plan("gpt-oss-20b", memory="40GiB", layout=order)
        text = kvatlas.map(made).text()
        body = text.splitlines()[3:]
        assert max(map(len, body)) <= 80
        assert any(f"  {row}" in line for line in body), text


def test_pictures_are_xml_of_a_readable_size() -> None:
    for made in plans()[::5]:
        picture = kvatlas.map(made).svg()
        assert ET.fromstring(picture).tag.endswith("svg")  # noqa: S314
        assert len(picture) < 500_000


def test_pictures_of_the_documents_are_what_is_drawn_now() -> None:
    images = Path(__file__).parents[2] / "docs" / "images"
    for layout in ENGINE_LAYOUTS:
        made = plan(images / "small-model.json", memory="64MiB", layout=layout.order)
        drawn = (images / f"{layout.order}.svg").read_text("utf-8")
        assert kvatlas.map(made).svg() == drawn, "run make map-pictures"


def test_rows_of_a_picture_are_looked_up_inside_of_themselves() -> None:
    made = plan("DeepSeek-V4-Flash", memory="40GiB")
    drawn = draw_plan(made, {})
    for group in sampled_groups(drawn, tuple(map(str, range(999))), 56, piece_columns=1):
        for row in group.rows:
            assert row.label != "head 0"  # what a row that ran into the next one was called


def test_what_cannot_be_drawn_or_written_is_refused(tmp_path: Path) -> None:
    made = plan("Qwen3-8B", memory="1GiB", max_len=512)
    with pytest.raises(AtlasError) as refusal:
        kvatlas.map("Qwen3-8B")  # type: ignore[arg-type]
    assert refusal.value.code is Code.BAD_PLAN
    for path in (tmp_path, tmp_path / "no" / "map.html", "\0"):
        with pytest.raises(AtlasError) as refusal:
            kvatlas.map(made).save(path)
        assert refusal.value.code is Code.UNWRITABLE
    for name in ("map.html", "map.svg", "map.txt"):
        assert kvatlas.map(made).save(tmp_path / name).stat().st_size > 500


def test_packs_of_layers_are_named_where_they_lie_outside_of_blocks() -> None:
    made = plan("Qwen3.5-397B-A17B", memory="80GiB", layout="LBNHC")
    lines = kvatlas.map(made).text()
    assert "L 5 packs of layers > B 3,971 blocks > L 3 layers > N 704 states" in lines


def test_knobs_of_a_page_combine_every_order_with_another_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def drawn() -> set[tuple[Any, ...]]:
        made = draw(PlanOptions(model="Qwen3-8B"), None, None, tokens=None, knobs=True).data
        return {tuple(one.knobs[name] for name in ("order", "block", "tp")) for one in made.plans}

    orders = [layout.order for layout in ENGINE_LAYOUTS]
    combined = drawn()
    assert {(order, block, 1) for order in orders for block in (16, 32, 64)} <= combined
    assert {(order, 16, tp) for order in orders for tp in (1, 2, 4, 8)} <= combined
    # Where the page would grow too large, one value is changed at a time.
    monkeypatch.setattr("kvatlas.cli.draw._MOST_DRAWN", 100)
    assert len(drawn()) < len(combined)
    assert {(order, 16, 1) for order in orders} <= drawn()
