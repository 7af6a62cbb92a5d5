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
from msgspec import UNSET

from kvatlas import AtlasError
from kvatlas.models import Model
from kvatlas.planning import (
    CacheDocument,
    Plan,
    TablesDocument,
    from_exchange,
    plan,
    to_exchange,
)
from kvatlas.specs import TensorScales
from tests.planning.exchange import brute_force, make_corpus, ours
from tests.planning.exchange.corpus_plans import IDENTITY, PLANS, SCALES
from tests.planning.exchange.hostile import hostile_cases
from tests.planning.exchange.mutants import mutants
from tests.planning.exchange.small_documents import small_cases
from tests.routing.fields_apart import model_of

ROOT = Path(__file__).parents[3]
CORPUS = make_corpus.CORPUS
CASES: dict[str, Any] = json.loads((CORPUS / "cases.json").read_bytes())
EXPECTED: dict[str, Any] = json.loads((CORPUS / "expected.json").read_bytes())
NAMES = sorted(PLANS)
COPIES = sorted(name for name in CASES if name.startswith("copy/"))
HOSTILE = sorted(name for name in CASES if name.startswith("hostile/"))
SMALL = sorted(name for name in CASES if name.startswith("small/"))
OF_QUESTIONS = {"bad_rank", "unknown_layer", "unknown_field", "missing_blocks"}
OF_COPIES = {
    "different_identity", "bad_rank", "missing_layers", "unlike_layers", "unlike_dtypes",
    "missing_blocks", "bad_tokens",
}  # fmt: skip


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


@pytest.mark.slow
def test_answers_are_those_of_brute_force() -> None:
    for name, case in CASES.items():
        if "runs" in EXPECTED[name]:
            assert brute_force.result(CORPUS, case) == EXPECTED[name], name


@pytest.mark.parametrize("name", HOSTILE + SMALL)
def test_documents_are_refused_with_the_code_of_the_specification(name: str) -> None:
    """The library reads documents only; questions and copies are the JavaScript reader's."""
    case, code = CASES[name], EXPECTED[name].get("refused")
    refusals = [ours.refusal(text_of, end) for end in case.get("copy", [case])]
    found = next((one for one in refusals if one is not None), None)
    late = OF_COPIES if "copy" in case else OF_QUESTIONS if "layer" in case else set()
    assert found == code or (found is None and code in late)


def test_small_cases_are_those_of_the_script() -> None:
    made = small_cases()
    assert made.cases == {name: CASES[name] for name in SMALL}
    assert {file: text_of(file) for file in made.files} == made.files
    for name in SMALL:
        assert EXPECTED[name] == make_corpus.small_answer(CORPUS, CASES[name], made.codes.get(name))


def test_small_documents_share_bytes_only_if_they_are_refused() -> None:
    """Brute force over all items; the rules also refuse some documents whose items are apart."""
    shared: dict[bool, list[str]] = {True: [], False: []}
    for name in SMALL:
        case = CASES[name]
        if EXPECTED[name].get("refused") == "overlap":
            shared[brute_force.shares_bytes(json.loads(text_of(case["document"])))].append(name)
        elif "refused" not in EXPECTED[name]:
            for end in case.get("copy", [case]):
                assert not brute_force.shares_bytes(json.loads(text_of(end["document"]))), name
    assert len(shared[True]) == 7
    assert shared[False] == [
        "small/blocks-apart/one-block-other-stride",
        "small/blocks-apart/other-count",
        "small/fields-apart/no-step-left",
        "small/fields-apart/no-steps",
        "small/fields-apart/other-count",
        "small/fields-apart/other-stride",
    ]


@pytest.mark.parametrize("span", [(5, 19), (3, 18), (1, 3), (7, 8)])
def test_ranges_within_states_have_the_runs_of_views(span: tuple[int, int], tmp_path: Path) -> None:
    """States of four tokens, in ranges that begin and end within a state."""
    name, layer, fields = "compressed", "layers.1.attn", ("latent", "latent_scale", "rope")
    value = json.loads(text_of(f"{name}.tables.json"))
    for table in value["tables"]:
        table["tokens"] = list(span) if table["group"] == 2 else table["tokens"]
    text = make_corpus.canonical(value)
    tables = TablesDocument.from_json(text, document_of(name))
    (tmp_path / "document.json").write_bytes(text_of(f"{name}.json"))
    (tmp_path / "tables.json").write_bytes(text)
    asked = {"document": "document.json", "tables": "tables.json", "rank": 0, "rows": None}
    for field in fields:
        case = asked | {"layer": layer, "field": field}
        expected = brute_force.result(tmp_path, case)["runs"]
        assert bool(expected) == (span[1] // 4 > span[0] // 4)
        assert ours.field_runs(plan_of(name), tables, case) == expected


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


@pytest.mark.slow
def test_readers_agree_on_documents_with_random_changes(tmp_path: Path) -> None:
    """What kvatlas refuses, the reader in JavaScript refuses with the same code."""
    found: dict[str, str | None] = {}
    for number, text in enumerate(mutants(CORPUS, NAMES, 600, seed=42)):
        (tmp_path / f"{number}.json").write_bytes(text)
        case = {"document": f"{number}.json"}
        found[f"{number}.json"] = ours.refusal(lambda file: (tmp_path / file).read_bytes(), case)
    assert 40 < list(found.values()).count(None) < 400
    assert len(set(found.values())) > 6
    (tmp_path / "cases.json").write_bytes(
        json.dumps({name: {"document": name} for name in found}).encode()
    )
    reader = ROOT / "tests/planning/exchange/run_reader.mjs"
    done = subprocess.run([node(), reader, tmp_path], capture_output=True, check=True)
    theirs = {name: one.get("refused") for name, one in json.loads(done.stdout).items()}
    assert theirs == found


def test_mutants_give_plans_or_refusals() -> None:
    """No document from outside raises another error than an `AtlasError`."""
    models = {plan_of(name).model: model_of(plan_of(name)) for name in NAMES}
    plans = 0
    for text in mutants(CORPUS, NAMES, 300, seed=7):
        model = models.get(json.loads(text).get("model"), models["dense"])
        try:
            made = from_exchange(text, model)
        except AtlasError:
            continue
        plans += 1
        assert set(made.layers) == {layer.name for layer in CacheDocument.from_json(text).layers}
    assert plans > 5


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
    for name in SMALL:
        if EXPECTED[name].get("refused") in (None, "overlap", "bad_field", "out_of_range"):
            for end in CASES[name].get("copy", [CASES[name]]):
                for file in (end["document"], end.get("tables", end["document"])):
                    assert check.is_valid(json.loads(text_of(file))), name
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


def test_a_model_that_disagrees_is_refused() -> None:
    for model, code in (
        (Model.load("Qwen3-8B"), "unknown_layer"),
        (model_of(plan_of("int8")), "bad_tensor"),
    ):
        with pytest.raises(AtlasError) as refusal:
            from_exchange(document_of("dense-LBNHC"), model)
        assert refusal.value.code == code


def test_models_must_have_the_dtypes_of_the_document() -> None:
    text = text_of("dense-LBNHC.json").replace(b"bf16", b"fp16")
    with pytest.raises(AtlasError) as refusal:
        from_exchange(text, model_of(plan_of("dense-LBNHC")))
    assert refusal.value.code == "unlike_dtypes"


@pytest.mark.parametrize("scale", [0.1, 0.0, -1.0, float("inf"), float("nan"), 1e300])
def test_scales_are_singles(scale: float) -> None:
    with pytest.raises(AtlasError) as refusal:
        to_exchange(plan_of("fp8"), scales={"layers.0.attn": TensorScales(scale)})
    assert refusal.value.code == "not_representable"


def test_scales_are_of_layers_that_have_them() -> None:
    with pytest.raises(AtlasError) as refusal:
        to_exchange(plan_of("fp8"), scales={"layers.9.attn": TensorScales(0.5)})
    assert refusal.value.code == "unknown_layer"
    fields = [
        field
        for layer in document_of("fp8").layers
        for field in layer.fields
        if layer.name == "layers.1.attn"
    ]
    assert [(field.name, field.scale) for field in fields] == [("k", "40000000"), ("v", "3e400000")]
    plain = to_exchange(plan_of("int8"), scales={"layers.0.attn": TensorScales(0.5)})
    assert all(field.scale is UNSET for layer in plain.layers for field in layer.fields)


MODELS = [
    "Llama-3.1-8B", "Gemma-3-27B", "Llama-4-Scout", "gpt-oss-20b", "Qwen3-Next-80B-A3B",
    "Qwen3.5-397B-A17B", "DeepSeek-V3.2", "DeepSeek-V4-Flash", "Kimi-Linear-48B-A3B",
    "MiniMax-M3", "Jamba-1.5-mini", "Nemotron-H-8B", "Zamba2-2.7B", "LFM2-1.2B",
]  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_plans_of_the_catalogue_come_back(name: str) -> None:
    made = plan(name, memory="80GiB", tp=2, max_len=8192)
    document = to_exchange(made)
    back = from_exchange(document.to_json(), model_of(made), max_len=made.max_len)
    assert to_exchange(back) == document
    assert (back.tp, back.pp, back.dcp) == (made.tp, made.pp, made.dcp)
    assert set(back.layers) == set(made.layers)
