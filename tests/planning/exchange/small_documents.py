"""Small documents, written by hand, for rules that the documents of plans do not exercise.

Each builder adds cases to a `Cases`. Answers with runs are computed by `brute_force`; codes and the
verdict that a document is valid are written down here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

Json = dict[str, Any]
WHOLE: Json = {"axis": "", "size": 1, "ranks": [[[0, 1]]]}
Tables = Mapping[int, tuple[Sequence[int], Sequence[int | None]]]
"""The tokens and the blocks of each group."""
End = tuple[Json | bytes, Tables]
"""A document, or bytes that are none, and its tables."""


def canonical(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def axes(**steps: Any) -> Json:
    """Axes of one step from pairs, and of several steps from lists of pairs."""
    return {
        a: [list(s)] if isinstance(s, tuple) else [list(x) for x in s] for a, s in steps.items()
    }


def field(name: str = "k", offset: int = 0, region: int = 0, shard: int = 0, **own: Any) -> Json:
    given = {"dtype": own.pop("dtype", "uint8")}
    if "scale" in own:
        given["scale"] = own.pop("scale")
    steps = axes(**(own or {"B": (4, 64), "N": (4, 16), "C": (16, 1)}))
    return {
        "name": name,
        "region": region,
        "offset": offset,
        "axes": steps,
        "shard": shard,
        **given,
    }


def layer(*fields: Json, name: str = "a", group: int = 0) -> Json:
    return {"name": name, "index": 0, "group": group, "fields": list(fields or [field()])}


def group(tokens: int = 4, holds: str = "tokens", context: int = 1, pool: int = 0) -> Json:
    return {"pool": pool, "holds": holds, "tokens": tokens, "context": context, "keeps": {}}


def heads(size: int, *ranks: list[list[int]] | None) -> Json:
    return {"axis": "H", "size": size, "ranks": list(ranks)}


def document(*layers: Json, **given: Any) -> Json:
    value = {
        "format": "kv-exchange", "version": 1, "model": "small", "identity": "", "ranks": 1,
        "regions": [1024], "groups": [group()], "shards": [WHOLE], "layers": list(layers),
    }  # fmt: skip
    return value | given


def tables_of(value: Json, tables: Tables) -> Json:
    return {
        "format": "kv-exchange-tables", "version": 1, "cache": sha256(canonical(value)).hexdigest(),
        "tables": [{"group": n, "tokens": t, "blocks": b} for n, (t, b) in tables.items()],
    }  # fmt: skip


class Cases:
    """Files, cases and the codes of the cases that are refused."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cases: dict[str, Json] = {}
        self.codes: dict[str, str] = {}

    def _add(self, name: str, case: Json, code: str | None) -> None:
        assert f"small/{name}" not in self.cases, name
        self.cases[f"small/{name}"] = case
        if code is not None:
            self.codes[f"small/{name}"] = code

    def _end(self, value: Json | bytes, tables: Tables | None) -> Json:
        """Write the files of one end; return the part of a case that names them."""
        text = value if isinstance(value, bytes) else canonical(value)
        file = f"small/{sha256(text).hexdigest()[:12]}.json"
        self.files[file] = text
        if tables is None:
            return {"document": file}
        listed = canonical(tables_of({} if isinstance(value, bytes) else value, tables))
        own = f"small/{sha256(listed).hexdigest()[:12]}.tables.json"
        self.files[own] = listed
        return {"document": file, "tables": own}

    def read(
        self, name: str, value: Json, tables: Tables | None = None, code: str | None = None
    ) -> None:
        self._add(name, self._end(value, tables), code)

    def runs(
        self, name: str, value: Json, tables: Tables, *, of: str = "a", field: str = "k",
        rank: int = 0, rows: list[int] | None = None, code: str | None = None,
    ) -> None:  # fmt: skip
        asked = {"rank": rank, "layer": of, "field": field, "rows": rows}
        self._add(name, self._end(value, tables) | asked, code)

    def copy(
        self, name: str, source: End, destination: End, *, ranks: tuple[int, int] = (0, 0),
        code: str | None = None,
    ) -> None:  # fmt: skip
        ends = [
            self._end(*end) | {"rank": rank}
            for end, rank in zip((source, destination), ranks, strict=True)
        ]
        self._add(name, {"copy": ends}, code)


def small_cases() -> Cases:
    cases = Cases()
    for build in (fields_apart, blocks_apart, contents, tables, ranges, rings, rows, orders):
        build(cases)
    return cases


def two_groups(other: Json, first: Json | None = None, **given: Any) -> Json:
    """A region with blocks of two groups."""
    layers = layer(first or field()), layer(other, name="b", group=1)
    return document(*layers, groups=[group(), group()], **given)


def blocks_apart(cases: Cases) -> None:
    both: Tables = {0: ([0, 8], [0, 1]), 1: ([0, 8], [2, 3])}
    for name, other in (
        ("same-place", field()),
        ("after-all-blocks", field(offset=256)),
        ("half-a-cell", field(offset=32, B=(4, 64), N=(4, 8), C=(8, 1))),
    ):
        cases.read(f"blocks-apart/{name}", two_groups(other), both)
        cases.runs(f"blocks-apart/{name}/runs", two_groups(other), both, of="b")
    outer = field(B=(4, 64), N=(4, 256), C=(64, 1))
    cases.runs("blocks-apart/stride-of-all-blocks", two_groups(outer, outer), both)
    for name, other in (
        ("other-stride", field(B=(2, 128), N=(4, 16), C=(16, 1))),
        ("other-count", field(B=(3, 64), N=(4, 16), C=(16, 1))),
        ("next-cell", field(offset=64)),
        ("across-cells", field(offset=32)),
    ):
        cases.read(f"blocks-apart/{name}", two_groups(other, regions=[4096]), code="overlap")
    between = two_groups(field(B=(4, 64), N=(4, 320), C=(16, 1)), outer, regions=[4096])
    cases.read("blocks-apart/stride-between", between, code="overlap")
    for name, stride in (("one-block", 64), ("one-block-stride-0", 0)):
        one = field(B=(1, stride), N=(4, 16), C=(16, 1))
        value = two_groups(one | {"offset": 40}, one)
        cases.runs(f"blocks-apart/{name}", value, {0: ([0, 4], [0])})
    unlike = two_groups(
        field(B=(1, 0), N=(4, 16), C=(16, 1)), field(B=(1, 64), N=(4, 16), C=(16, 1))
    )
    cases.read("blocks-apart/one-block-other-stride", unlike, code="overlap")


def fields_apart(cases: Cases) -> None:
    half: Json = {"B": (4, 64), "N": (4, 8), "C": (8, 1)}
    rows: Json = {"B": (4, 64), "N": (4, 16), "C": (8, 1)}
    dots: Json = {"B": (4, 64), "N": (4, 16), "C": (4, 4)}
    used: Tables = {0: ([0, 8], [3, 1])}
    for name, one, other in (
        ("halves", half, {"offset": 32} | half),
        ("rows", rows, {"offset": 8} | rows),
        ("items", dots, {"offset": 1} | dots),
    ):
        value = document(layer(field(**one), field("v", **other)))
        cases.runs(f"fields-apart/{name}", value, used, field="v")
    refused: list[tuple[str, Json, Json]] = [
        ("other-stride", half, {"offset": 32, "B": (2, 128), "N": (4, 8), "C": (8, 1)}),
        ("other-count", half, {"offset": 32, "B": (3, 64), "N": (4, 8), "C": (8, 1)}),
        ("more-than-a-stride", half, {"offset": 40} | half),
        ("rows-overlap", rows, {"offset": 4} | rows),
        ("no-step-left", dots, {"offset": 1, "B": (4, 64), "N": (4, 16), "C": (1, 1)}),
        ("no-steps", half, {"offset": 32, "B": (1, 0), "N": (1, 0), "C": (1, 0)}),
    ]
    for name, one, other in refused:
        value = document(layer(field(**one), field("v", **other)))
        cases.read(f"fields-apart/{name}", value, code="overlap")
    shards = [WHOLE | {"ranks": [[[0, 1]], None]}, WHOLE | {"ranks": [None, [[0, 1]]]}]
    layers = layer(), layer(field(shard=1), name="b")
    on_two = document(*layers, shards=shards, ranks=2)
    cases.read("fields-apart/on-different-ranks", on_two, code="overlap")


def contents(cases: Cases) -> None:
    """Each property of the content, between parts of a layer and between documents."""
    rows: Json = {"B": (4, 64), "N": (4, 16), "H": (2, 8), "C": (8, 1)}
    state: Json = {"B": (4, 64), "H": (2, 8), "C": (8, 1)}
    two = [heads(2, [[0, 2]]), WHOLE]
    plain, ring, recurrent = group(), group(holds="ring"), group(holds="state")
    unlike: list[tuple[str, Json, Json, list[Json]]] = [
        ("p", {}, {}, [plain, group(8)]),
        ("holds", {}, {}, [plain, ring]),
        ("ring-and-state", {}, {"steps": state}, [ring, recurrent]),
        ("axis", {}, {"shard": 1}, [plain, plain]),
        ("scale", {"scale": "3f800000"}, {"scale": "3f000000"}, [plain, plain]),
        ("no-scale", {"scale": "3f800000"}, {}, [plain, plain]),
        ("dtype", {}, {"dtype": "int8"}, [plain, plain]),
        ("size", {}, {"steps": rows | {"C": (4, 1)}}, [plain, plain]),
        ("name-of-an-axis", {}, {"steps": rows | {"D": (1, 0)}}, [plain, plain]),
    ]
    for name, one, other, groups in unlike:
        made = []
        for given in (one, other):
            own = {key: value for key, value in given.items() if key != "steps"}
            made.append(field(**own, **given.get("steps", rows)))
        shared = {"shards": two, "regions": [1024, 1024]}
        parts = layer(made[0]), layer(made[1] | {"region": 1}, group=1)
        cases.read(
            f"contents/parts-{name}", document(*parts, groups=groups, **shared), code="bad_field"
        )
        ends = [
            document(layer(own), groups=[held], **shared)
            for own, held in zip(made, groups, strict=True)
        ]
        code = "unlike_dtypes" if "scale" in name or name == "dtype" else "unlike_layers"
        used: Tables = {0: ([0, 4], [1])}
        cases.copy(f"contents/copy-{name}", (ends[0], used), (ends[1], used), code=code)
    longer = field(region=1, B=(4, 128), N=(8, 16), C=(16, 1))
    value = document(layer(), layer(longer, group=1), groups=[ring, ring], regions=[1024, 1024])
    cases.runs("contents/rings-of-other-lengths", value, {0: ([0, 9], [1]), 1: ([0, 9], [2])})


def tables(cases: Cases) -> None:
    second = field("v", region=1, B=(3, 64), N=(4, 16), C=(16, 1))
    value = document(layer(field(), second), regions=[256, 256])
    cases.read("tables/largest-block", value, {0: ([0, 8], [2, 0])})
    cases.read("tables/smaller-field", value, {0: ([0, 8], [0, 3])}, code="out_of_range")
    unused = document(layer(), groups=[group(), group()])
    cases.read("tables/group-without-layers", unused, {1: ([0, 0], [])}, code="bad_exchange")
    cases.runs("tables/other-entries", document(layer()), {0: ([8, 12], [None, 99, 1, 1, 99])})
    cases.read("tables/empty-range", document(layer()), {0: ([5, 5], [None, 99])})
    held: list[tuple[str, Json]] = [("state", {"B": (4, 64), "C": (16, 1)}), ("ring", {})]
    for holds, steps in held:
        value = document(layer(field(**steps)), groups=[group(holds=holds)])
        for blocks in ([], [1, 1], [None], [99]):
            name = f"tables/empty-{holds}-{'-'.join(map(str, blocks))}"
            cases.runs(name, value, {0: ([3, 3], list(blocks))})
        cases.read(f"tables/null-{holds}", value, {0: ([2, 3], [None])}, code="missing_blocks")


def ranges(cases: Cases) -> None:
    """States of several tokens, in ranges that begin and end within a state."""
    four = field(B=(4, 64), N=(2, 32), C=(32, 1))
    value = document(layer(four), groups=[group(8)])
    bigger = field(B=(4, 128), N=(4, 32), C=(32, 1))
    other = document(layer(bigger), groups=[group(16)])
    for first, stop in ((3, 14), (5, 14), (4, 13), (1, 3), (7, 8), (3, 4)):
        used: Tables = {0: ([first, stop], [2, 0])}
        cases.runs(f"ranges/{first}-{stop}", value, used)
        cases.copy(f"ranges/copy-{first}-{stop}", (value, used), (other, {0: ([2, 15], [3])}))
    for shard in (WHOLE | {"ranks": [[[0, 1]]] * 2},):
        context = document(layer(four), groups=[group(8, context=2)], shards=[shard], ranks=2)
        for rank in (0, 1):
            cases.runs(f"ranges/context-{rank}", context, {0: ([5, 27], [2, 0])}, rank=rank)
    for axis in ([1, 99], [3, 9], [0, 1]):
        held = document(
            layer(field(B=(4, 64), N=(4, 16), H=(3, 4), C=(4, 1))), shards=[heads(3, [[0, 3]])]
        )
        cases.runs(f"ranges/rows-{axis[0]}-{axis[1]}", held, {0: ([0, 8], [1, 2])}, rows=axis)
        cases.runs(f"ranges/whole-{axis[0]}-{axis[1]}", value, {0: ([0, 8], [1])}, rows=axis)


def rings(cases: Cases) -> None:
    ends = []
    for many in (8, 4):
        own = field(B=(4, 128), N=(many, 16), C=(16, 1))
        ends.append(document(layer(own), groups=[group(holds="ring")]))
    for name, source, destination in (("shorter", 0, 1), ("longer", 1, 0)):
        for spans in (([0, 11], [0, 9]), ([0, 9], [0, 11]), ([2, 5], [0, 7])):
            used: list[Tables] = [
                {0: (list(span), [place + 1])} for place, span in enumerate(spans)
            ]
            key = "-".join(str(token) for span in spans for token in span)
            cases.copy(f"rings/{name}-{key}", (ends[source], used[0]), (ends[destination], used[1]))


def rows(cases: Cases) -> None:
    """Several parts with a row, and copies between ranks that share no row."""

    def part(region: int, many: int) -> Json:
        return field(region=region, shard=region, B=(4, 64), N=(4, 16), H=(many, 4), C=(4, 1))

    shards = [heads(3, [[0, 2]], None), heads(3, [[1, 2]], [[1, 2]]), heads(3, [[0, 3]], [[0, 3]])]
    given: Json = {
        "shards": shards, "ranks": 2, "regions": [256] * 3, "groups": [group(), group(), group()],
    }  # fmt: skip
    parts = document(layer(part(0, 2)), layer(part(1, 2), group=1), **given)
    whole = document(layer(part(2, 3), group=2), **given)
    used: Tables = {0: ([0, 4], [1]), 1: ([0, 8], [2, 3])}
    all_rows: Tables = {2: ([0, 8], [0, 1])}
    cases.runs("rows/of-both-parts", parts, used)
    cases.runs("rows/table-of-a-part-missing", parts, {0: used[0]}, code="missing_blocks")
    cases.runs("rows/table-of-a-part-not-needed", parts, {1: used[1]}, rank=1)
    cases.copy("rows/first-part-is-read", (parts, used), (whole, all_rows))
    cases.copy("rows/every-part-is-written", (whole, all_rows), (parts, used))
    cases.copy("rows/from-parts-to-parts", (parts, used), (parts, used), ranks=(0, 1))
    cases.copy(
        "rows/no-table-of-a-source-part",
        (parts, {0: used[0]}),
        (whole, all_rows),
        code="missing_blocks",
    )

    split = [heads(3, [[0, 1]], [[1, 1]], None)]
    one = field(B=(4, 64), N=(4, 16), H=(1, 4), C=(4, 1))
    apart = document(layer(one), shards=split, ranks=3)
    one_table: Tables = {0: ([0, 4], [1])}
    cases.runs("rows/not-held", apart, {}, rank=2)
    cases.copy("rows/none-in-common", (apart, one_table), (apart, one_table), ranks=(0, 1))
    cases.copy(
        "rows/none-in-common-no-source-table",
        (apart, {}),
        (apart, one_table),
        ranks=(0, 1),
        code="missing_blocks",
    )
    cases.copy(
        "rows/none-in-common-no-destination-table",
        (apart, one_table),
        (apart, {}),
        ranks=(0, 1),
        code="missing_blocks",
    )
    cases.copy("rows/held-by-one", (apart, {}), (apart, {}), ranks=(0, 2))

    state = layer(field(B=(4, 64), H=(1, 4), C=(4, 1)), name="s", group=1)
    mixed = document(
        layer(one | {"region": 1}), state, shards=split, ranks=3, regions=[256, 256],
        groups=[group(), group(holds="state")],
    )  # fmt: skip
    for name, here, there, to, code in (
        ("equal", [0, 5], [2, 5], 0, None),
        ("other", [0, 5], [0, 6], 0, "bad_tokens"),
        ("other-rows", [0, 5], [0, 6], 1, "bad_tokens"),
        ("other-empty", [3, 3], [0, 5], 0, "bad_tokens"),
        ("equal-empty", [5, 5], [0, 5], 0, None),
        ("not-held", [0, 5], [0, 6], 2, None),
    ):
        ends = [(mixed, {0: ([0, 4], [1]), 1: (span, [2])}) for span in (here, there)]
        cases.copy(f"rows/stop-{name}", ends[0], ends[1], ranks=(0, to), code=code)
    last = field(B=(4, 16), C=(16, 1))
    single = document(
        layer(last), layer(last | {"region": 1}, name="b", group=1),
        regions=[64, 64], groups=[group(holds="state")] * 2,
    )  # fmt: skip
    stops: Tables = {0: ([0, 5], [1]), 1: ([0, 6], [2])}
    cases.copy("rows/stop-of-two-layers", (single, stops), (single, stops))
    lacks: list[Any] = [(mixed, {1: ([0, stop], [2])}) for stop in (5, 6)]
    cases.copy("rows/stop-other-and-no-table", lacks[0], lacks[1], code="missing_blocks")


def orders(cases: Cases) -> None:
    """Two faults: the first check gives the code."""
    good, used = document(layer(), layer(field(offset=256), name="b")), {0: ([0, 8], [1, 2])}
    reversed_: Tables = {0: ([9, 8], [])}
    cases.copy("orders/identities-unknown", (good, used), (good, {0: ([0, 8], [3, 0])}))
    cases.copy("orders/rank-of-source", (good, used), (good, used), ranks=(1, 0), code="bad_rank")
    cases.copy(
        "orders/rank-of-destination", (good, used), (good, used), ranks=(0, 1), code="bad_rank"
    )
    known = good | {"identity": "0" * 64}
    cases.copy(
        "orders/identity-and-rank",
        (good, used),
        (known, used),
        ranks=(1, 0),
        code="different_identity",
    )
    cases.copy("orders/identity-and-tables", (good, used), (known, reversed_), code="bad_tokens")
    cases.copy(
        "orders/source-tables-and-destination", (good, reversed_), (b"x", used), code="bad_tokens"
    )
    cases.copy("orders/source-and-destination", (b"x", used), (good, reversed_), code="unreadable")
    wrong = good | {"layers": []}
    cases.read("orders/document-and-tables", wrong, reversed_, code="bad_exchange")
    renamed = document(layer(), layer(field(offset=256), name="c"))
    cases.copy(
        "orders/rank-and-layers", (good, used), (renamed, used), ranks=(0, 1), code="bad_rank"
    )
    types = document(layer(field(dtype="int8")), layer(field("v", offset=256), name="b"))
    cases.copy("orders/dtypes-and-later-fields", (good, used), (types, used), code="unlike_layers")
    sizes = document(layer(field("v")), layer(field(offset=256), name="c"))
    cases.copy("orders/fields-and-later-layers", (good, used), (sizes, used), code="missing_layers")
    cases.copy("orders/layers-and-tables", (good, {}), (renamed, used), code="missing_layers")
    cases.runs("orders/rank-and-layer", good, used, of="z", rank=1, code="bad_rank")
    cases.runs("orders/layer-and-field", good, used, of="z", field="q", code="unknown_layer")
    cases.runs("orders/field-and-table", good, {}, field="q", code="unknown_field")
    cases.runs("orders/table", good, {}, code="missing_blocks")
