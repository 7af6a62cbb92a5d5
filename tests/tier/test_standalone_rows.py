"""A reader and a writer without kvatlas agree with kvatlas on every byte of every kind of row."""

from __future__ import annotations

import ast
import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples import tier_file, tier_rows
from examples.tier_rows import Rows

from kvatlas.geometry import Placement
from kvatlas.models import CacheIdentity, Model
from kvatlas.planning import Plan
from kvatlas.tier import FolderStore, StoreTier, Tier
from kvatlas.tier.canonical_rows import canonical_rows, kinds_of_rows
from kvatlas.tier.chained_keys import PrefixChain
from kvatlas.tier.namespaces import Namespace, RowName
from kvatlas.tier.object_header import ObjectPlace, checksum, header
from kvatlas.tier.request_blocks import Cover
from kvatlas.tier.row_objects import RowObjects
from tests.planning.models import SMALL
from tests.tier.row_vectors import IDENTITY, VECTORS, payload, tokens_of
from tests.tier.world import World, small, tier_plan

KINDS = ("dense", "sliding", "latent", "sparse", "compressed", "mamba hybrid", "delta hybrid")
OURS = CacheIdentity(weights=IDENTITY["weights"], tenant=IDENTITY["tenant"])
SPAN = 32


def standalone(rows: Plan, **cut: Any) -> Rows:
    kinds = [kind.to_data() for kind in kinds_of_rows(rows)]
    kinds = json.loads(json.dumps(kinds))
    return Rows(kinds, rows.block_size, **IDENTITY, **cut)


def planned(model: Model, **options: Any) -> Plan:
    memory = "96MiB" if model.name == "compressed" else "1536KiB"
    return small(model, **{"memory": memory, **options})


@lru_cache
def view_of(made: Plan, layer: str, field: str) -> Placement:
    return made.view(layer, field)


def content(made: Plan, pools: Any, tables: Any, layer: str, where: tuple[Any, ...]) -> bytes:
    """The bytes of one field, of one head of a state, that a cache of one rank holds."""
    name, head, state, recurrent = where
    region, _ = made.region_of(layer)
    pool = pools[made.groups[region.group].pool]
    page, table = made.page(layer), tables[region.group]
    view = view_of(made, layer, name)
    chosen: dict[str, int] = {"B": table[-1]}
    if not recurrent:
        block, inner = divmod(state, made.spec(layer).states(region.block))
        chosen["B"] = table[block]
        if region.kernel_block != region.block:
            chosen["k"], inner = divmod(inner, page.states)
        chosen["N"] = inner
        if "H" in view.axes:
            chosen["H"] = head
    for axis, value in chosen.items():
        view = view.select(axis, value)
    starts = view.offset + sum(
        stride * index.ravel()
        for stride, index in zip(view.strides, np.indices(view.sizes), strict=True)
    )
    return b"".join(pool[at : at + view.item].tobytes() for at in starts.tolist())


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("cut", [{}, {"shards": 2}, {"shards": 4, "stages": 2}])
def test_names_and_objects_are_those_of_the_specification(name: str, cut: dict[str, int]) -> None:
    rows = canonical_rows(SMALL[name], span=SPAN)
    ours, theirs = RowObjects(rows, **cut), standalone(rows, **cut)
    names = Namespace(OURS, ours)
    assert (ours.shards, names.digest) == (theirs.shards, theirs.namespace)
    for number, objects in enumerate(ours.groups):
        ranges = [
            list(zip(start.tolist(), (start + length).tolist(), strict=True))
            for start, length in objects.objects
        ]
        assert theirs.objects(number) == ranges
        assert theirs.nbytes(number) == rows.pools[number].block_bytes


@pytest.mark.parametrize("name", KINDS)
def test_rows_go_from_kvatlas_to_the_reader_and_from_the_writer_to_kvatlas(
    name: str, tmp_path: Path
) -> None:
    model = SMALL[name]
    memory = "96MiB" if name == "compressed" else "1536KiB"
    world = World(model, 150, memory=memory, states="apart")  # no state is split
    one, two = tmp_path / "of kvatlas", tmp_path / "of another program"
    about: dict[str, Any] = {"staging": 1 << 20, "timeout": 60.0}
    rows = canonical_rows(model, span=SPAN, max_len=192)
    with StoreTier(FolderStore(one), rows, OURS, **about) as tier:
        world.store(tier, planned(model, tp=2, layout="BLNHC"))
        all_keys = world.keys(tier)
    reader = standalone(rows)
    folder = one / "kv2" / reader.tenant / reader.namespace.hex()
    found = {str(path.relative_to(folder)) for path in folder.glob("*/*")}
    written = 0
    for number, keys in all_keys.items():
        for entry, key in enumerate(keys):
            for first, stop in [*covers(rows, number, entry)]:
                row_name = reader.name(number, key, first, stop)
                if row_name not in found:
                    continue
                again = assembled(world, rows, reader, number, entry, (first, stop))
                assert reader.read(one, row_name) == again
                reader.write(two, row_name, again)
                written += 1
    assert written == len(found) > 0
    for path in one.rglob("*"):
        if path.is_file() and path.parent.name != "marks" and ".kvatlas" not in path.name:
            assert (two / path.relative_to(one)).read_bytes() == path.read_bytes()
    with StoreTier(FolderStore(two), rows, OURS, **about) as tier:
        world.check(tier, planned(model))


def covers(rows: Plan, number: int, entry: int) -> list[tuple[int, int]]:
    """The tokens that a row may have: every range is tried, because a reader knows no plan."""
    if rows.groups[number].kind == "recurrent":
        return [(0, 150)]
    left = min(rows.block_size, 150 - entry * rows.block_size)
    return [(first, left) for first in range(left)]


def assembled(
    world: World, rows: Plan, reader: Rows, number: int, entry: int, cover: tuple[int, int]
) -> bytes:
    """A row put together from the contents of a cache, field by field, by the specification."""
    kind, row = reader.kinds[number], bytearray(reader.nbytes(number))
    layers = {layer.index: layer.name for layer in rows.regions[number].layers}
    per = kind["per_state"]
    states = range(cover[0] // per, cover[1] // per) if per else range(1)
    for group in kind["groups"]:
        for field in (field for plane in group for field in plane):
            if field["name"].startswith("pad"):
                continue
            for layer in kind["layers"]:
                for head in range(kind["heads"]):
                    for state in states:
                        at = entry * reader.states(kind) + state
                        where = (field["name"], head, at, not per)
                        found = content(
                            world.base, world.contents, world.tables, layers[layer], where
                        )
                        row[reader.place(number, field["name"], layer, head, state)] = found
    return bytes(row)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: str(vector["model"]))
def test_kvatlas_and_the_standalone_program_pass_the_corpus(vector: dict[str, Any]) -> None:
    rows = canonical_rows(SMALL[vector["model"]], span=vector["span"], max_len=192)
    theirs = Rows(vector["kinds"], vector["span"], **IDENTITY, shards=vector["shards"])
    kinds = [kind.to_data() for kind in kinds_of_rows(rows)]
    assert json.loads(json.dumps(kinds)) == vector["kinds"]
    tokens, salt = tokens_of(vector), bytes.fromhex(vector["salt"])
    chain = PrefixChain(rows, tokens, salt=salt, lora=vector["lora"])
    keys = tier_rows.keys(tokens, vector["span"], salt, vector["lora"])
    assert [key.hex() for key in keys] == vector["keys"]
    ends = [*range(vector["span"], len(tokens), vector["span"]), len(tokens)]
    assert [chain.key_at(end).hex() for end in ends] == vector["keys"]
    assert theirs.namespace.hex() == vector["namespace"]
    for number, name, layer, head, state, start, stop in vector["places"]:
        assert theirs.place(number, name, layer, head, state) == slice(start, stop)
    names = Namespace(OURS, RowObjects(rows))
    assert [mark.rpartition("/")[2] for mark in names.marks] == vector["marks"]
    made = {}
    for number, objects in enumerate(names.cut.groups):
        content = np.frombuffer(payload(number, rows.pools[number].block_bytes), np.uint8)
        stop = vector["span"] if vector["kinds"][number]["per_state"] else len(tokens)
        row = RowName(number, chain.key_at(len(tokens)), Cover(0, stop))
        for index, (starts, lengths) in enumerate(objects.objects):
            ranges = zip(starts.tolist(), lengths.tolist(), strict=True)
            part = np.concatenate([content[at : at + many] for at, many in ranges])
            place = ObjectPlace(names.digest, row.digest, index)
            stored = header(place, part.nbytes, checksum([part])).tobytes() + part.tobytes()
            made[names.objects(row)[index]] = [len(stored), hashlib.sha256(stored).hexdigest()]
    assert made == vector["objects"]


@pytest.mark.parametrize("name", ["sliding", "mamba hybrid"])
def test_a_file_goes_from_kvatlas_to_the_reader_and_from_the_writer_to_kvatlas(
    name: str, tmp_path: Path
) -> None:
    model, world = SMALL[name], World(SMALL[name], 100)
    made = tier_plan(model)
    with Tier.open(tmp_path / "one", made) as tier:
        world.store(tier, small(model, tp=2))
        known = set(tier.names())
    text, blocks = tier_file.read(tmp_path / "one")
    assert Plan.from_json(text) == made
    assert {(block.group, block.key) for block in blocks} == known
    tier_file.write(tmp_path / "two", text, list(reversed(blocks)))
    with Tier.open(tmp_path / "two") as tier:
        world.check(tier, small(model, layout="LBNHC"))


def test_a_block_of_a_file_has_its_bytes_where_the_specification_says(tmp_path: Path) -> None:
    model, world = SMALL["dense"], World(SMALL["dense"], 64)
    for layout in ("BLHNC", "BHLNC"):
        made, path = tier_plan(model, layout=layout), tmp_path / layout
        with Tier.open(path, made) as tier:
            world.store(tier, small(model))
        text, blocks = tier_file.read(path)
        (region,) = json.loads(text)["regions"]
        heads, states, row = 4, made.block_size, made.page(made.layers[0]).content
        for entry, block in enumerate(blocks):
            for number, layer in enumerate(region["layers"]):
                for head in range(heads):
                    at = number * region["page_stride"] + head * states * row
                    if layout == "BHLNC":
                        at = (head * len(region["layers"]) + number) * region["page_stride"]
                    for state in range(states):
                        where = ("k", head, entry * states + state, False)
                        found = content(
                            world.base, world.contents, world.tables, layer["name"], where
                        )
                        begin = region["offset"] + at + state * row
                        assert block.data[begin : begin + len(found)] == found


def test_the_standalone_program_is_short_and_needs_the_standard_library_only() -> None:
    text = Path(tier_rows.__file__).read_text()
    assert len(text.splitlines()) <= 200
    imported = {
        name.name.partition(".")[0] if isinstance(node, ast.Import) else (node.module or "")
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    allowed = {"__future__", "hashlib", "json", "struct", "sys", "zlib", "itertools", "math"}
    assert imported <= allowed | {"pathlib", "typing"}
