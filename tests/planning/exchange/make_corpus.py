"""Write the corpus of the exchange format: documents, cases and the answers.

    python -m tests.planning.exchange.make_corpus [--small]

`cases.json` maps the name of each case to what a reader computes:

- `{"document": FILE}`: read a document; the answer is its digest;
- `{"document": FILE, "tables": FILE}`: read a document and the tables of a request;
- with `rank`, `layer`, `field` and `rows`: the runs of a field;
- `{"copy": [SOURCE, DESTINATION]}`, each with `document`, `tables` and `rank`: the runs of a copy.

`expected.json` has the answer of each case: `digest`, `runs`, or the code with which it is
`refused`. All runs are those of `brute_force`; codes are written down by hand in `hostile` and
`small_documents`.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from kvatlas.planning import CacheDocument, TablesDocument, to_exchange
from tests.planning.exchange import brute_force
from tests.planning.exchange.corpus_plans import IDENTITY, PLANS, SCALES
from tests.planning.exchange.hostile import hostile_cases
from tests.planning.exchange.small_documents import small_cases

CORPUS = Path(__file__).parent / "corpus"
ROOT = Path(__file__).parents[3]
Json = dict[str, Any]


def canonical(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def listing(value: Json) -> bytes:
    """JSON with one line for each entry, so that changes can be read."""
    lines = [f"{json.dumps(key)}:{canonical(one).decode()}" for key, one in sorted(value.items())]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def tables_of(document: Json, digest: str, rng: random.Random) -> Json:
    """Block tables of a request with random ids; windows lack the blocks before them."""
    first, stop = rng.choice([(0, 33), (5, 33), (14, 33), (0, 20)])
    most = {
        layer["group"]: min(field["axes"]["B"][0][0] for field in layer["fields"])
        for layer in document["layers"]
    }
    used: dict[int, set[int]] = {}
    tables = []
    for number, group in enumerate(document["groups"]):
        taken = used.setdefault(group["pool"], {0})
        # Positions of one group, so that a ring and a window have their own.
        start = max(first, stop - group["keeps"].get("window", stop))
        if group["holds"] == "ring":
            start = max(start, (stop - 1) // 4 * 4)
        end = group["keeps"].get("source", stop)
        start = 0 if "source" in group["keeps"] else start
        span = group["tokens"] * group["context"]
        count = -(-end // span) if group["holds"] == "tokens" else 1
        blocks: list[int | None] = []
        for entry in range(count):
            if group["holds"] == "tokens" and entry < start // span:
                blocks.append(None)
                continue
            # Neighbours in half of the cases, so that runs join.
            before = blocks[-1] if blocks and blocks[-1] is not None else -2
            choice = before + 1 if rng.random() < 0.5 else rng.randrange(most[number])
            while choice in taken or not 0 <= choice < most[number]:
                choice = rng.randrange(most[number])
            taken.add(choice)
            blocks.append(choice)
        tables.append({"group": number, "tokens": [start, end], "blocks": blocks})
    return {
        "format": "kv-exchange-tables", "version": 1, "cache": digest, "tables": tables,
    }  # fmt: skip


def field_cases(name: str, document: Json, rng: random.Random) -> Json:
    """The runs of every field of some layers, on the first and the last rank."""
    cases: Json = {}
    names = list(dict.fromkeys(layer["name"] for layer in document["layers"]))
    chosen = names if len(names) <= 6 else [names[0], names[-1]]
    for layer in document["layers"]:
        for field in layer["fields"] if layer["name"] in chosen else ():
            shard = document["shards"][field["shard"]]
            for rank in sorted({0, document["ranks"] - 1}):
                rows = None
                if shard["axis"] and rng.random() < 0.5:
                    start = rng.randrange(shard["size"])
                    rows = [start, rng.randint(start + 1, shard["size"])]
                key = f"{name}/{layer['name']}/{field['name']}/{rank}"
                cases[key] = {
                    "document": f"{name}.json", "tables": f"{name}.tables.json", "rank": rank,
                    "layer": layer["name"], "field": field["name"], "rows": rows,
                }  # fmt: skip
    return cases


def copy_cases(documents: dict[str, Json], rng: random.Random) -> Json:
    """Copies between documents of the same content, with random ranks."""
    alike: dict[bytes, list[str]] = {}
    for name, document in documents.items():
        alike.setdefault(canonical(content(document)), []).append(name)
    cases: Json = {}
    for names in alike.values():
        for place, name in enumerate(names):
            for other in sorted({names[place - 1], names[(place + 3) % len(names)]} - {name}):
                ends = [
                    {
                        "document": f"{one}.json",
                        "tables": f"{one}.tables.json",
                        "rank": rng.randrange(documents[one]["ranks"]),
                    }
                    for one in (name, other)
                ]
                cases[f"copy/{name}/{other}"] = {"copy": ends}
    return cases


def stage_case(folder: Path) -> Json:
    """A copy from a rank that holds layers of one group: other groups need no tables."""
    ends = []
    for name in ("stages", "one-stage"):
        value = json.loads((folder / f"{name}.tables.json").read_bytes())
        value["tables"] = [table for table in value["tables"] if table["group"] == 0]
        (folder / f"{name}.group.tables.json").write_bytes(canonical(value))
        ends.append({"document": f"{name}.json", "tables": f"{name}.group.tables.json", "rank": 0})
    return {"copy/stages/without-tables-of-others": {"copy": ends}}


def content(document: Json) -> Any:
    """What two documents have in common between which a copy is possible."""
    found = set()
    for layer in document["layers"]:
        group = document["groups"][layer["group"]]
        for field in layer["fields"]:
            shard = document["shards"][field["shard"]]
            rows = {
                axis: shard["size"] if axis == shard["axis"] else product(steps)
                for axis, steps in field["axes"].items()
                if axis not in "BN"
            }
            per_state = group["tokens"] // product(field["axes"].get("N", [[1, 0]]))
            per_state = per_state if group["holds"] == "tokens" else 0
            found.add(
                (layer["name"], field["name"], field["dtype"], field.get("scale"),
                 per_state, str(sorted(rows.items())))
            )  # fmt: skip
    return sorted(map(str, found))


def product(steps: list[list[int]]) -> int:
    total = 1
    for size, _ in steps:
        total *= size
    return total


def write(folder: Path) -> None:
    rng = random.Random(42)  # noqa: S311
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    documents: dict[str, Json] = {}
    cases: Json = {}
    expected: Json = {}
    for name, make in PLANS.items():
        text = to_exchange(make(), identity=IDENTITY, scales=SCALES.get(name)).to_json()
        document = json.loads(text)
        documents[name] = document
        (folder / f"{name}.json").write_bytes(text)
        digest = sha256(text).hexdigest()
        tables = tables_of(document, digest, rng)
        (folder / f"{name}.tables.json").write_bytes(canonical(tables))
        cases[name] = {"document": f"{name}.json", "tables": f"{name}.tables.json"}
        expected[name] = {"digest": digest}
        cases |= field_cases(name, document, rng)
    cases |= copy_cases(documents, rng) | stage_case(folder)
    for name, case in cases.items():
        if name not in expected:
            stops = end_tokens(folder, case)
            expected[name] = (
                {"refused": "bad_tokens"} if stops else brute_force.result(folder, case)
            )
    write_refused_and_small(folder, cases, expected)


def write_refused_and_small(folder: Path, cases: Json, expected: Json) -> None:
    """Add the cases of `hostile` and `small_documents`, and write the lists."""
    for directory in ("hostile", "small"):
        shutil.rmtree(folder / directory, ignore_errors=True)
        (folder / directory).mkdir()
    for name, hostile in hostile_cases(folder).items():
        for file, text in hostile.files.items():
            (folder / file).write_bytes(text)
        cases[name] = hostile.case
        expected[name] = {"refused": hostile.code}
    small = small_cases()
    for file, text in small.files.items():
        (folder / file).write_bytes(text)
    for name, case in small.cases.items():
        cases[name] = case
        expected[name] = small_answer(folder, case, small.codes.get(name))
    (folder / "cases.json").write_bytes(listing(cases))
    (folder / "expected.json").write_bytes(listing(expected))


def small_answer(folder: Path, case: Json, code: str | None) -> Json:
    if code is not None:
        return {"refused": code}
    if "copy" in case or "layer" in case:
        return brute_force.result(folder, case)
    return {"digest": sha256((folder / case["document"]).read_bytes()).hexdigest()}


def schema() -> Json:
    """The JSON Schema of documents and of block tables."""
    made, parts = msgspec.json.schema_components(
        (CacheDocument, TablesDocument), ref_template="#/$defs/{name}"
    )
    for name in ("CacheDocument", "TablesDocument"):  # `format` and `version` have defaults
        parts[name]["required"] = sorted(parts[name]["properties"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Documents and block tables of the exchange format, version 1",
        "anyOf": list(made),
        "$defs": parts,
    }


def end_tokens(folder: Path, case: Json) -> bool:
    """Whether a copy is between states after different tokens."""
    if "copy" not in case:
        return False
    ends = [json.loads((folder / one["tables"]).read_bytes())["tables"] for one in case["copy"]]
    documents = [json.loads((folder / one["document"]).read_bytes()) for one in case["copy"]]
    stops = [
        {table["tokens"][1] for table in end if own["groups"][table["group"]]["holds"] == "state"}
        for end, own in zip(ends, documents, strict=True)
    ]
    return stops[0] != stops[1]


def kept(file: str) -> Json:
    """The entries of a list of the corpus that are made from plans."""
    value = json.loads((CORPUS / file).read_bytes())
    return {key: one for key, one in value.items() if not key.startswith(("hostile/", "small/"))}


if __name__ == "__main__":
    if sys.argv[1:] == ["--small"]:  # the documents of plans and their answers stay as they are
        write_refused_and_small(CORPUS, kept("cases.json"), kept("expected.json"))
    else:
        write(CORPUS)
    text = json.dumps(schema(), indent=1, sort_keys=True) + "\n"
    (ROOT / "docs/reference/exchange.schema.json").write_text(text)
