"""The corpus of the exchange format: kvatlas, a reader in JavaScript and brute force agree."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvatlas import AtlasError
from kvatlas.models import Model
from kvatlas.planning import CacheDocument, Plan, TablesDocument, from_exchange, to_exchange
from kvatlas.planning.exchange_parts import DocumentData, TablesData
from tests.planning.exchange import brute_force, make_corpus, ours
from tests.planning.exchange.corpus_plans import IDENTITY, PLANS, SCALES
from tests.planning.exchange.hostile import hostile_cases
from tests.routing.fields_apart import model_of

ROOT = Path(__file__).parents[3]
CORPUS = make_corpus.CORPUS
CASES: dict[str, Any] = json.loads((CORPUS / "cases.json").read_bytes())
EXPECTED: dict[str, Any] = json.loads((CORPUS / "expected.json").read_bytes())
NAMES = sorted(PLANS)
COPIES = sorted(name for name in CASES if name.startswith("copy/"))
HOSTILE = sorted(name for name in CASES if name.startswith("hostile/"))


@cache
def plan_of(name: str) -> Plan:
    return PLANS[name]()


def text_of(file: str) -> bytes:
    return (CORPUS / file).read_bytes()


def name_of(document: str) -> str:
    return document.removesuffix(".json")


@cache
def document_of(name: str) -> CacheDocument:
    return CacheDocument.from_json(text_of(f"{name}.json"))


@cache
def read_plan(name: str) -> Plan:
    made = plan_of(name)
    return from_exchange(document_of(name), model_of(made), max_len=made.max_len)


def tables_of(name: str) -> TablesDocument:
    return TablesDocument.from_json(text_of(f"{name}.tables.json"), document_of(name))


@pytest.mark.parametrize("name", NAMES)
def test_documents_are_those_of_their_plans(name: str) -> None:
    document = to_exchange(plan_of(name), identity=IDENTITY, scales=SCALES.get(name))
    assert document.to_json() == text_of(f"{name}.json")
    assert document.digest == EXPECTED[name]["digest"]
    back = to_exchange(read_plan(name), identity=IDENTITY, scales=SCALES.get(name))
    assert back == document


@pytest.mark.parametrize("name", NAMES)
def test_runs_are_those_of_the_plans_views(name: str) -> None:
    """Of the plan from which the document was made, and of the plan that was read from it."""
    tables = tables_of(name)
    cases = {key: case for key, case in CASES.items() if key.startswith(f"{name}/")}
    assert cases
    for key, case in cases.items():
        for made in (plan_of(name), read_plan(name)):
            assert ours.field_runs(made, tables, case) == EXPECTED[key]["runs"], key


def test_copies_are_those_of_routes() -> None:
    compared = 0
    for key in COPIES:
        names = [name_of(one["document"]) for one in CASES[key]["copy"]]
        ranks = [one["rank"] for one in CASES[key]["copy"]]
        if "refused" in EXPECTED[key] or "ring" in names:
            continue
        found = ours.copy_runs(list(map(read_plan, names)), list(map(tables_of, names)), ranks)
        if found is not None:
            compared += 1
            assert found == EXPECTED[key]["runs"], key
    assert compared > len(COPIES) // 2, compared


def test_answers_are_those_of_brute_force() -> None:
    for name, case in CASES.items():
        if "runs" in EXPECTED[name]:
            assert brute_force.result(CORPUS, case) == EXPECTED[name], name


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_documents_are_refused(name: str) -> None:
    case, code = CASES[name], EXPECTED[name]["refused"]
    if "copy" in case or "layer" in case:  # the reader in JavaScript refuses these
        return
    assert ours.refusal(text_of, case) == code


def test_hostile_files_are_those_of_the_script() -> None:
    made = hostile_cases(CORPUS)
    assert {name: one.case for name, one in made.items()} == {name: CASES[name] for name in HOSTILE}
    for one in made.values():
        for file, text in one.files.items():
            assert text_of(file) == text


def node() -> str:
    """The path of Node, without which these tests are skipped, but never on the CI machine."""
    found = shutil.which("node")
    if found is None:
        assert not os.environ.get("CI"), "the CI machine needs Node"
        pytest.skip("Node is not installed")
    return found


def test_the_reader_in_javascript_agrees_byte_for_byte() -> None:
    reader = ROOT / "tests/planning/exchange/run_reader.mjs"
    done = subprocess.run([node(), reader, CORPUS], capture_output=True, check=False)
    assert not done.returncode, done.stderr.decode()
    assert done.stdout.rstrip() == make_corpus.canonical(EXPECTED)


def test_the_reader_in_javascript_is_short_and_alone() -> None:
    text = (ROOT / "examples/exchange_reader.mjs").read_text()
    assert len(text.splitlines()) <= 300
    assert {line.split(" from ")[1] for line in text.splitlines() if line.startswith("import")} == {
        '"node:crypto";'
    }


# -- the schema -----------------------------------------------------------------------------------

SCHEMA = ROOT / "docs/reference/exchange.schema.json"


def test_the_schema_is_that_of_the_decoder() -> None:
    assert json.loads(SCHEMA.read_bytes()) == make_corpus.schema()


def test_the_schema_accepts_the_corpus() -> None:
    check = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_bytes()))
    for name in NAMES:
        for file in (f"{name}.json", f"{name}.tables.json"):
            assert list(check.iter_errors(json.loads(text_of(file)))) == []
    refused = 0
    for name in HOSTILE:
        file = CASES[name].get("tables" if name.startswith("hostile/tables") else "document", "")
        if "hostile/" not in file or EXPECTED[name]["refused"] in ("unreadable", "not_canonical"):
            continue
        if name in ("hostile/deep", "hostile/long-number"):  # more than Python's json accepts
            continue
        value = json.loads(text_of(file))
        wrong = not check.is_valid(value)
        refused += wrong
        assert not wrong or EXPECTED[name]["refused"] in ("bad_exchange", "unlike_versions"), name
    assert refused > 40


def test_structs_have_the_keys_of_the_schema() -> None:
    assert set(DocumentData.__struct_fields__) == set(document_of("sparse").__struct_fields__)
    assert "cache" in TablesData.__struct_fields__


def test_a_model_that_disagrees_is_refused() -> None:
    for model, code in (
        (Model.load("Qwen3-8B"), "unknown_layer"),
        (model_of(plan_of("int8")), "bad_tensor"),
    ):
        with pytest.raises(AtlasError) as refusal:
            from_exchange(document_of("dense-LBNHC"), model)
        assert refusal.value.code == code
