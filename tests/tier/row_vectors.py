"""The corpus of row vectors, and the program that makes it from the standalone writer.

    python -m tests.tier.row_vectors > tests/tier/row_vectors.json

makes it anew. `examples/tier_rows.py` computes all names and bytes; only the description of each
model's caches comes from kvatlas. A row of kind K has byte (7 i + K) mod 251 at offset i.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

from examples.tier_rows import Rows, canonical, digest, keys

IDENTITY: dict[str, Any] = {"tenant": "tenant ä/1", "weights": "sha256:5f1a"}
FILE = Path(__file__).with_suffix(".json")
VECTORS: list[dict[str, Any]] = json.loads(FILE.read_text()) if FILE.exists() else []
MODELS = ("dense", "sliding", "latent", "sparse", "compressed", "mamba hybrid", "delta hybrid")


def payload(kind: int, nbytes: int) -> bytes:
    """The bytes of a row of the corpus."""
    period = bytes((7 * offset + kind) % 251 for offset in range(251))
    return (period * (nbytes // 251 + 1))[:nbytes]


def tokens_of(vector: dict[str, Any]) -> list[int]:
    """The tokens of a vector's request, whose last token ends a row."""
    return [(37 * place) % 1000 for place in range(2 * vector["span"])]


def vector(name: str, kinds: list[Any], span: int) -> dict[str, Any]:
    """One model of the corpus: names and bytes of two rows of each kind."""
    rows = Rows(kinds, span, **IDENTITY)
    made: dict[str, Any] = {
        "model": name, "kinds": kinds, "span": span, "shards": rows.shards,
        "salt": "00ff", "lora": "adapter ü", "namespace": rows.namespace.hex(),
        "marks": [digest(canonical(rows.levels[: n + 1])).hex() for n in range(5)],
    }  # fmt: skip
    tokens = tokens_of(made)
    made["keys"] = [key.hex() for key in keys(tokens, span, b"\x00\xff", "adapter ü")]
    places, objects = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for number, kind in enumerate(kinds):
            cover = (0, span) if kind["per_state"] else (0, len(tokens))
            key = bytes.fromhex(made["keys"][-1])
            content = payload(number, rows.nbytes(number))
            rows.write(Path(folder), rows.name(number, key, *cover), content)
            layer, head = kind["layers"][-1], kind["heads"] - 1
            for name_of in [f["name"] for g in kind["groups"] for plane in g for f in plane]:
                where = (number, name_of, layer, head, rows.states(kind) - 1)
                found = rows.place(*where)
                places.append([*where, found.start, found.stop])
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file() and path.parent.name != "marks":
                data = path.read_bytes()
                about = [len(data), hashlib.sha256(data).hexdigest()]
                objects[str(path.relative_to(folder))] = about
    return {**made, "places": places, "objects": objects}


def main() -> None:
    from kvatlas.tier.canonical_rows import canonical_rows, kinds_of_rows
    from tests.planning.models import SMALL

    found = []
    for name in MODELS:
        rows = canonical_rows(SMALL[name], span=32)
        kinds = json.loads(json.dumps([kind.to_data() for kind in kinds_of_rows(rows)]))
        found.append(vector(name, kinds, rows.block_size))
    print(json.dumps(found, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
