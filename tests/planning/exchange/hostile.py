"""Documents and tables that readers must refuse, each with its code."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

Json = dict[str, Any]
Change = Callable[[Json], object]


class Hostile(NamedTuple):
    """Files, the case that reads them, and the code of the refusal."""

    files: dict[str, bytes]
    case: Json
    code: str


def canonical(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def at(*path: str | int, to: Any) -> Change:
    """Replace the value at a path."""

    def change(value: Any) -> None:
        for key in path[:-1]:
            value = value[key]
        value[path[-1]] = to

    return change


def without(*path: str | int) -> Change:
    def change(value: Any) -> None:
        for key in path[:-1]:
            value = value[key]
        del value[path[-1]]

    return change


K = ("layers", 0, "fields", 0)
V = ("layers", 0, "fields", 1)

CHANGED: dict[str, tuple[str, Change, str]] = {
    # structure
    "other-format": ("dense-LBNHC", at("format", to="safetensors"), "bad_exchange"),
    "no-format": ("dense-LBNHC", without("format"), "bad_exchange"),
    "version-2": ("dense-LBNHC", at("version", to=2), "unlike_versions"),
    "version-2-with-new-keys": (
        "dense-LBNHC", lambda d: d.update(version=2, planets=["Earth"]), "unlike_versions"
    ),
    "version-0": ("dense-LBNHC", at("version", to=0), "bad_exchange"),
    "version-true": ("dense-LBNHC", at("version", to=True), "bad_exchange"),
    "version-text": ("dense-LBNHC", at("version", to="1"), "bad_exchange"),
    "no-layers": ("dense-LBNHC", at("layers", to=[]), "bad_exchange"),
    "no-regions-key": ("dense-LBNHC", without("regions"), "bad_exchange"),
    "no-identity-key": ("dense-LBNHC", without("identity"), "bad_exchange"),
    "no-keeps-key": ("dense-LBNHC", without("groups", 0, "keeps"), "bad_exchange"),
    "unknown-key": ("dense-LBNHC", at("comment", to="hello"), "bad_exchange"),
    "unknown-key-of-field": ("dense-LBNHC", at(*K, "address", to=4096), "bad_exchange"),
    "prototype-key": ("dense-LBNHC", at("toString", to=1), "bad_exchange"),
    "proto-key": ("dense-LBNHC", at("__proto__", to={}), "bad_exchange"),
    "negative-offset": ("dense-LBNHC", at(*K, "offset", to=-16), "bad_exchange"),
    "negative-stride": ("dense-LBNHC", at(*K, "axes", "B", to=[[64, -16]]), "bad_exchange"),
    "fraction": ("dense-LBNHC", at(*K, "offset", to=0.5), "bad_exchange"),
    "boolean-offset": ("dense-LBNHC", at(*K, "offset", to=True), "bad_exchange"),
    "text-offset": ("dense-LBNHC", at(*K, "offset", to="0"), "bad_exchange"),
    "null-offset": ("dense-LBNHC", at(*K, "offset", to=None), "bad_exchange"),
    "beyond-2-53": ("dense-LBNHC", at("regions", 0, to=2**53), "bad_exchange"),
    "beyond-2-64": ("dense-LBNHC", at(*K, "offset", to=2**64), "bad_exchange"),
    "empty-region": ("dense-LBNHC", at("regions", 0, to=0), "bad_exchange"),
    "no-ranks": ("dense-LBNHC", at("ranks", to=0), "bad_exchange"),
    "too-many-ranks": ("dense-LBNHC", at("ranks", to=65537), "bad_exchange"),
    "size-0": ("dense-LBNHC", at(*K, "axes", "C", to=[[0, 2]]), "bad_exchange"),
    "no-steps": ("dense-LBNHC", at(*K, "axes", "C", to=[]), "bad_exchange"),
    "nine-steps": ("dense-LBNHC", at(*K, "axes", "C", to=[[1, 0]] * 9), "bad_exchange"),
    "step-of-three": ("dense-LBNHC", at(*K, "axes", "C", to=[[8, 2, 1]]), "bad_exchange"),
    "axis-in-lower-case": ("dense-LBNHC", at(*K, "axes", "c", to=[[1, 0]]), "bad_exchange"),
    "axis-of-two-letters": ("dense-LBNHC", at(*K, "axes", "KV", to=[[1, 0]]), "bad_exchange"),
    "axes-in-a-list": ("dense-LBNHC", at(*K, "axes", to=[["B", 64, 16]]), "bad_exchange"),
    "name-with-newline": ("dense-LBNHC", at("layers", 0, "name", to="layer\n"), "bad_exchange"),
    "name-with-quote": ("dense-LBNHC", at("layers", 0, "name", to='a"b'), "bad_exchange"),
    "name-not-ascii": ("dense-LBNHC", at("model", to="modèle"), "bad_exchange"),
    "name-empty": ("dense-LBNHC", at("model", to=""), "bad_exchange"),
    "name-too-long": ("dense-LBNHC", at("model", to="m" * 257), "bad_exchange"),
    "identity-too-short": ("dense-LBNHC", at("identity", to="5f1a"), "bad_exchange"),
    "identity-in-capitals": ("dense-LBNHC", at("identity", to="A" * 64), "bad_exchange"),
    "holds-something": ("dense-LBNHC", at("groups", 0, "holds", to="pages"), "bad_exchange"),
    "keeps-something": ("dense-LBNHC", at("groups", 0, "keeps", "sinks", to=4), "bad_exchange"),
    "window-0": ("dense-LBNHC", at("groups", 0, "keeps", "window", to=0), "bad_exchange"),
    "scale-too-short": ("fp8", at(*K, "scale", to="3f80"), "bad_exchange"),
    "scale-a-number": ("fp8", at(*K, "scale", to=1), "bad_exchange"),
    "dtype-empty": ("dense-LBNHC", at(*K, "dtype", to=""), "bad_exchange"),
    "dtype-too-long": ("dense-LBNHC", at(*K, "dtype", to="d" * 257), "bad_exchange"),
    # references
    "no-such-group": ("dense-LBNHC", at("layers", 0, "group", to=1), "bad_exchange"),
    "no-such-region": ("dense-LBNHC", at(*K, "region", to=1), "bad_exchange"),
    "no-such-shard": ("dense-LBNHC", at(*K, "shard", to=7), "bad_exchange"),
    "region-of-two-pools": ("sliding", at("groups", 1, "pool", to=1), "bad_exchange"),
    "context-of-a-state": ("mamba-apart-tp4", at("groups", 1, "context", to=2), "bad_exchange"),
    "two-indices": ("hybrid", at("layers", 0, "index", to=9), "bad_exchange"),
    # content
    "dtype-unknown": ("dense-LBNHC", at(*K, "dtype", to="fp7"), "unknown_dtype"),
    "dtype-alias": ("dense-LBNHC", at(*K, "dtype", to="bfloat16"), "unknown_dtype"),
    "dtype-of-the-prototype": ("dense-LBNHC", at(*K, "dtype", to="constructor"), "unknown_dtype"),
    "ranks-of-shard": ("dense-LBHNC-tp2", at("shards", 0, "ranks", to=[[[0, 2]]]), "bad_field"),
    "shard-of-nobody": (
        "dense-LBHNC-tp2", at("shards", 0, "ranks", to=[None, None]), "bad_field"
    ),
    "unequal-ranks": (
        "dense-LBHNC-tp2", at("shards", 0, "ranks", 1, to=[[2, 1]]), "bad_field"
    ),
    "rows-beyond-the-model": (
        "dense-LBHNC-tp2", at("shards", 0, "ranks", 1, to=[[3, 2]]), "bad_field"
    ),
    "rows-descend": (
        "dense-LBHNC-tp2", at("shards", 0, "ranks", 1, to=[[3, 1], [2, 1]]), "bad_field"
    ),
    "rows-adjacent": (
        "dense-LBHNC-tp2", at("shards", 0, "ranks", 1, to=[[2, 1], [3, 1]]), "bad_field"
    ),
    "rows-near-2-53": (
        "dense-LBHNC-tp2", at("shards", 0, "ranks", 1, to=[[2**53 - 1, 2]]), "bad_field"
    ),
    "axis-of-shard-in-lower-case": (
        "dense-LBHNC-tp2", at("shards", 0, "axis", to="h"), "bad_exchange"
    ),
    "shard-without-ranks": ("dense-LBHNC-tp2", at("shards", 0, "ranks", to=[]), "bad_exchange"),
    "rows-without-axis": ("latent", at("shards", 0, "ranks", 0, to=[[0, 2]]), "bad_field"),
    "row-1-without-axis": ("latent", at("shards", 0, "ranks", 0, to=[[1, 1]]), "bad_field"),
    "no-axes": ("dense-LBNHC", at(*K, "axes", to={}), "bad_field"),
    "size-without-axis": ("latent", at("shards", 0, "size", to=2), "bad_field"),
    "fewer-heads": ("dense-LBNHC", at(*K, "axes", "H", to=[[3, 32]]), "bad_field"),
    "no-heads": ("dense-LBNHC", without(*K, "axes", "H"), "bad_field"),
    "heads-in-steps": ("dense-LBNHC", at(*K, "axes", "H", to=[[2, 64], [2, 32]]), "bad_field"),
    "no-blocks": ("dense-LBNHC", without(*K, "axes", "B"), "bad_field"),
    "blocks-in-steps": (
        "dense-LBNHC", at(*K, "axes", "B", to=[[32, 4096], [2, 2048]]), "bad_field"
    ),
    "no-states": ("dense-LBNHC", without(*K, "axes", "N"), "bad_field"),
    "states-of-a-state": (
        "sglang-mamba", at("layers", 0, "fields", 0, "axes", "N", to=[[1, 0]]), "bad_field"
    ),
    "states-do-not-divide": ("dense-LBNHC", at("groups", 0, "tokens", to=24), "bad_field"),
    "huge-axis": (
        "dense-LBNHC", at(*K, "axes", "C", to=[[2**27, 0], [2**27, 0]]), "bad_field"
    ),
    "shard-of-states": ("dense-LBNHC", at("shards", 0, "axis", to="N"), "bad_field"),
    "parts-with-other-dtypes": (
        "hybrid", at("layers", 0, "fields", 0, "dtype", to="fp16"), "bad_field"
    ),
    "parts-with-other-fields": ("hybrid", without("layers", 0, "fields", 1), "bad_field"),
    "field-twice": ("dense-LBNHC", at(*V, "name", to="k"), "bad_field"),
    # bytes
    "odd-offset": ("dense-LBNHC", at(*K, "offset", to=1), "misaligned"),
    "odd-stride": ("dense-LBNHC", at(*K, "axes", "C", to=[[8, 3]]), "misaligned"),
    "odd-scale": ("int8", at("layers", 0, "fields", 1, "offset", to=10), "misaligned"),
    "past-the-region": ("dense-LBNHC", at("regions", 0, to=262_140), "out_of_bounds"),
    "offset-past-the-region": ("dense-LBNHC", at(*K, "offset", to=262_144), "out_of_bounds"),
    "huge-stride": ("dense-LBNHC", at(*K, "axes", "C", to=[[8, 2**53 - 2]]), "out_of_bounds"),
    "huge-blocks": (
        "dense-LBNHC", at(*K, "axes", "B", to=[[2**53 - 1, 2**53 - 2]]), "out_of_bounds"
    ),
    "stride-0": ("dense-LBNHC", at(*K, "axes", "H", to=[[4, 0]]), "overlap"),
    "heads-overlap": ("dense-LBNHC", at(*K, "axes", "H", to=[[4, 8]]), "overlap"),
    "blocks-overlap": ("dense-LBNHC", at(*K, "axes", "B", to=[[64, 1024]]), "overlap"),
    "not-nested": (
        "dense-LBNHC", at(*K, "axes", "C", to=[[2, 6], [4, 4]]), "overlap"
    ),
    "v-on-k": ("dense-LBNHC", at(*V, "offset", to=0), "overlap"),
    "v-on-half-of-k": ("dense-LBNHC", at(*V, "offset", to=8), "overlap"),
    "layer-on-layer": ("sglang-hnd", at("layers", 1, "fields", 0, "offset", to=64), "overlap"),
    "block-on-another": ("sliding", at("layers", 0, "fields", 0, "offset", to=64), "overlap"),
    "groups-with-other-blocks": (
        "sliding", at("layers", 1, "fields", 0, "axes", "B", to=[[64, 2048]]), "overlap"
    ),
}  # fmt: skip

TABLES: dict[str, tuple[str, Change, str]] = {
    "tables-format": ("dense-LBNHC", at("format", to="kv-exchange"), "bad_exchange"),
    "tables-version": ("dense-LBNHC", at("version", to=3), "unlike_versions"),
    "tables-of-another": ("dense-LBNHC", at("cache", to="0" * 64), "checksum"),
    "tables-with-address": ("dense-LBNHC", at("tables", 0, "device", to=0), "bad_exchange"),
    "tables-negative-id": ("dense-LBNHC", at("tables", 0, "blocks", 0, to=-1), "bad_exchange"),
    "tables-no-such-group": ("dense-LBNHC", at("tables", 0, "group", to=1), "bad_exchange"),
    "tables-group-twice": (
        "dense-LBNHC", lambda t: t["tables"].append(t["tables"][0]), "bad_exchange"
    ),
    "tables-reversed": ("dense-LBNHC", at("tables", 0, "tokens", to=[9, 8]), "bad_tokens"),
    "tables-too-short": ("dense-LBNHC", at("tables", 0, "blocks", to=[1]), "missing_blocks"),
    "tables-with-null": (
        "dense-LBNHC", at("tables", 0, "blocks", to=[1, None, 3]), "missing_blocks"
    ),
    "tables-id-too-large": (
        "dense-LBNHC", at("tables", 0, "blocks", to=[1, 64, 3]), "out_of_range"
    ),
    "tables-id-twice": (
        "dense-LBNHC", at("tables", 0, "blocks", to=[1, 2, 1]), "twice"
    ),
    "tables-two-states": ("sglang-mamba", at("tables", 0, "blocks", to=[1, 2]), "missing_blocks"),
    "tables-no-state": ("sglang-mamba", at("tables", 0, "blocks", to=[]), "missing_blocks"),
    "tables-id-in-two-groups": (
        "mamba", lambda t: t["tables"][2].update(blocks=t["tables"][1]["blocks"]), "twice"
    ),
}  # fmt: skip


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda text: text.replace(old, new, 1)


BYTES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", "unreadable"),
    "cut-off": (lambda text: text[:-1], "unreadable"),
    "two-documents": (lambda text: text + text, "unreadable"),
    "not-utf-8": (replaced(b'"dense"', b'"dens\xe9"'), "unreadable"),
    "byte-order-mark": (lambda text: b"\xef\xbb\xbf" + text, "unreadable"),
    "utf-16": (lambda text: text.decode().encode("utf-16-le"), "unreadable"),
    "not-a-number": (replaced(b'"offset":0', b'"offset":NaN'), "unreadable"),
    "trailing-comma": (replaced(b'"version":1}', b'"version":1,}'), "unreadable"),
    "a-list": (lambda text: b"[" + text + b"]", "bad_exchange"),
    "a-number": (lambda _: b"1", "bad_exchange"),
    "null": (lambda _: b"null", "bad_exchange"),
    "deep": (lambda _: b"[" * 100_000 + b"]" * 100_000, "bad_exchange"),
    "infinity": (replaced(b'"offset":0', b'"offset":1e999'), "bad_exchange"),
    "long-number": (replaced(b'"offset":0', b'"offset":' + b"9" * 5000), "bad_exchange"),
    "blanks": (replaced(b'"offset":0', b'"offset": 0'), "not_canonical"),
    "newline": (lambda text: text + b"\n", "not_canonical"),
    "as-float": (replaced(b'"offset":0', b'"offset":0.0'), "not_canonical"),
    "exponent": (replaced(b'"offset":0', b'"offset":0e0'), "not_canonical"),
    "minus-zero": (replaced(b'"offset":0', b'"offset":-0'), "not_canonical"),
    "key-twice": (replaced(b'"offset":0', b'"offset":0,"offset":0'), "not_canonical"),
    "key-twice-unlike": (replaced(b'"offset":0', b'"offset":64,"offset":0'), "not_canonical"),
    "key-twice-first-wrong": (
        replaced(b'"offset":0', b'"offset":"x","offset":0'), "not_canonical"
    ),
    "key-twice-last-wrong": (replaced(b'"offset":0', b'"offset":0,"offset":"x"'), "bad_exchange"),
    "keys-unsorted": (
        lambda text: b'{"version":1,' + text.replace(b',"version":1}', b"}")[1:], "not_canonical"
    ),
    "version-as-float": (replaced(b'"version":1', b'"version":1.0'), "not_canonical"),
    "version-with-exponent": (replaced(b'"version":1', b'"version":10e-1'), "not_canonical"),
    "version-nearly-1": (replaced(b'"version":1', b'"version":0.' + b"9" * 20), "not_canonical"),
    "version-2-as-float": (replaced(b'"version":1', b'"version":2.0'), "unlike_versions"),
    "version-1-and-a-half": (replaced(b'"version":1', b'"version":1.5'), "bad_exchange"),
    "version-twice": (replaced(b'"version":1', b'"version":2,"version":1'), "not_canonical"),
    "version-twice-last-2": (
        replaced(b'"version":1', b'"version":1,"version":2'), "unlike_versions"
    ),
    "positive-exponent": (replaced(b'"pool":0', b'"pool":1e2'), "not_canonical"),
    "near-2-53-as-float": (
        replaced(b'"pool":0', b'"pool":9007199254740990.9999999999'), "not_canonical"
    ),
    "rounds-to-2-53": (replaced(b'"pool":0', b'"pool":9007199254740991.5'), "bad_exchange"),
    "rounds-to-0": (replaced(b'"pool":0', b'"pool":1e-400'), "not_canonical"),
    "rounds-to-minus-0": (replaced(b'"pool":0', b'"pool":-1e-400'), "not_canonical"),
    "surrogate": (replaced(b'"dense"', b'"\\ud800"'), "bad_exchange"),
    "surrogate-as-key": (replaced(b'"version":1}', b'"version":1,"\\ud800":1}'), "bad_exchange"),
    "surrogate-as-tag": (replaced(b'"holds":"tokens"', b'"holds":"\\ud800"'), "bad_exchange"),
    "surrogate-in-bytes": (replaced(b'"dense"', b'"\xed\xa0\x80"'), "unreadable"),
    "control-character": (replaced(b'"dense"', b'"a\x01"'), "unreadable"),
    "escaped-letter": (replaced(b'"dense"', b'"\\u0064ense"'), "not_canonical"),
}  # fmt: skip

COPIES: dict[str, tuple[str, Change, str]] = {
    "copy-other-identity": ("dense-LBNHC", at("identity", to="0" * 64), "different_identity"),
    "copy-no-identity": ("dense-LBNHC", at("identity", to=""), "different_identity"),
    "copy-other-layer": ("dense-LBNHC", at("layers", 1, "name", to="x"), "missing_layers"),
    "copy-fewer-layers": ("dense-LBNHC", without("layers", 1), "missing_layers"),
    "copy-other-field": ("dense-LBNHC", at(*V, "name", to="w"), "unlike_layers"),
    "copy-fewer-elements": ("dense-LBNHC", at(*K, "axes", "C", to=[[4, 2]]), "unlike_layers"),
    "copy-fp16": ("dense-LBNHC", at(*K, "dtype", to="fp16"), "unlike_dtypes"),
    "copy-other-scale": ("fp8", at(*K, "scale", to="3f800000"), "unlike_dtypes"),
    "copy-no-scale": ("fp8", without(*K, "scale"), "unlike_dtypes"),
}  # fmt: skip


def hostile_cases(folder: Path) -> dict[str, Hostile]:
    """All hostile cases, made from the valid documents of a corpus."""
    cases: dict[str, Hostile] = {}
    for name, (base, change, code) in CHANGED.items():
        value = copy.deepcopy(json.loads((folder / f"{base}.json").read_bytes()))
        change(value)
        file = f"hostile/{name}.json"
        cases[f"hostile/{name}"] = Hostile({file: canonical(value)}, {"document": file}, code)
    for name, (spoil, code) in BYTES.items():
        text = spoil((folder / "dense-LBNHC.json").read_bytes())
        file = f"hostile/{name}.json"
        cases[f"hostile/{name}"] = Hostile({file: text}, {"document": file}, code)
    for name, (base, change, code) in TABLES.items():
        value = json.loads((folder / f"{base}.tables.json").read_bytes())
        change(value)
        file = f"hostile/{name}.json"
        case = {"document": f"{base}.json", "tables": file}
        cases[f"hostile/{name}"] = Hostile({file: canonical(value)}, case, code)
    for name, (base, change, code) in COPIES.items():
        value = json.loads((folder / f"{base}.json").read_bytes())
        change(value)
        text = canonical(value)
        tables = json.loads((folder / f"{base}.tables.json").read_bytes())
        tables["cache"] = sha256(text).hexdigest()
        file, own = f"hostile/{name}.json", f"hostile/{name}.tables.json"
        ends = [
            {"document": f"{base}.json", "tables": f"{base}.tables.json", "rank": 0},
            {"document": file, "tables": own, "rank": 0},
        ]
        files = {file: text, own: canonical(tables)}
        cases[f"hostile/{name}"] = Hostile(files, {"copy": ends}, code)
    # The first rank of two stages has layers of group 0 alone.
    for name, dropped in (("copy-no-source-table", 0), ("copy-no-destination-table", 1)):
        ends, files = [], {}
        for place, end in enumerate(("stages", "one-stage")):
            file = f"hostile/{name}-{place}.json"
            value = json.loads((folder / f"{end}.tables.json").read_bytes())
            value["tables"] = [one for one in value["tables"] if one["group"] or place != dropped]
            files[file] = canonical(value)
            ends.append({"document": f"{end}.json", "rank": 0, "tables": file})
        cases[f"hostile/{name}"] = Hostile(files, {"copy": ends}, "missing_blocks")
    dense = {"document": "dense-LBNHC.json", "tables": "dense-LBNHC.tables.json"}
    asked = {"rank": 0, "layer": "layers.0.attn", "field": "k", "rows": None}
    for name, wrong, code in (
        ("rank", {"rank": 1}, "bad_rank"),
        ("layer", {"layer": "layers.9.attn"}, "unknown_layer"),
        ("field", {"field": "q"}, "unknown_field"),
    ):
        cases[f"hostile/no-such-{name}"] = Hostile({}, {**dense, **asked, **wrong}, code)
    return cases
