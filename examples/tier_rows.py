"""Read and write the rows of a kvatlas tier without kvatlas: docs/reference/tier_format.md as code.

Only the standard library is used. A folder is the store: each object is a file. `Rows` takes the
description of a model's caches that the last mark of a namespace contains, and gives the names of
rows, the position of every field in a row, and the objects that a row is cut into.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

ROOT, VERSION, CRC32 = "kv2", 2, 1
HEADER = struct.Struct("<8sHHIQ16s16sI")
WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}  # all other dtypes have items of one byte
LEVELS = ("tenant", "model", "weights", "dtype", "format")


def digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def canonical(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()


def keys(tokens: list[int], span: int, salt: bytes = b"", lora: str = "") -> list[bytes]:
    """Return the key of each row of a request; the last row may be partial."""
    link = digest(b"\x92" + _msgpack(salt, 0xC4) + _msgpack(lora.encode(), 0xD9, 0xA0))
    links = [link]
    for start in range(0, len(tokens), span):
        some = tokens[start : start + span]
        links.append(digest(links[-1] + struct.pack(f"<{len(some)}q", *some)))
    return links[1:]


def _msgpack(data: bytes, code: int, short: int = 0) -> bytes:
    if short and len(data) < 32:
        return bytes([short | len(data)]) + data
    size = next(n for n in range(3) if len(data) < 1 << 8 * 2**n)
    return bytes([code + size]) + len(data).to_bytes(2**size, "big") + data


class Rows:
    """The rows of one namespace."""

    def __init__(self, kinds: list[Any], span: int, tenant: str, weights: str, **cut: int) -> None:
        self.kinds, self.span, self.stages = kinds, span, cut.get("stages", 1)
        self.shards = cut.get("shards") or self._most_shards()
        self.tenant = digest(tenant.encode()).hex()
        caches = [
            [layer, kind["per_state"], sorted(map(list, kind["keeps"].items())), kind["heads"]]
            for kind in kinds
            for layer in kind["layers"]
        ]
        self.levels = [tenant, sorted(caches), weights, kinds, [span, self.shards, self.stages]]
        self.namespace = digest(canonical(self.levels))

    def _most_shards(self) -> int:
        sections, shards = [s for k in self.kinds for f in fields(k) for s in f["sections"]], 16
        while any(units % shards and (shards % units or not both) for units, _, both in sections):
            shards //= 2
        return shards

    def states(self, kind: Any) -> int:
        """Return the number of states in a row."""
        return int(self.span // kind["per_state"]) if kind["per_state"] else 1

    def page(self, kind: Any) -> int:
        """Return the bytes of one head of one layer, which are equal in all groups of heads."""
        return self.states(kind) * sum(width(one) for one in fields(kind)) // len(kind["groups"])

    def nbytes(self, number: int) -> int:
        """Return the bytes of a row of a kind."""
        kind = self.kinds[number]
        pages = len(kind["groups"]) * len(kind["layers"]) * int(kind["heads"])
        return pages * self.page(kind)

    def place(self, number: int, name: str, layer: int, head: int, state: int) -> slice:
        """Return the bytes of a row that have one field, of one state of one head of a layer."""
        kind = self.kinds[number]
        for nth, group in enumerate(kind["groups"]):
            above = (nth * kind["heads"] + head) * len(kind["layers"])
            at = (above + kind["layers"].index(layer)) * self.page(kind)
            for plane in group:
                row, before = sum(map(width, plane)), 0
                for field in plane:
                    if field["name"] == name:
                        first = at + state * row + before
                        return slice(first, first + width(field))
                    before += width(field)
                at += self.states(kind) * row
        raise KeyError(name)

    def objects(self, number: int) -> list[list[tuple[int, int]]]:
        """Return the byte ranges (start, stop) of each object of a row."""
        stretches: dict[tuple[int, tuple[int, ...]], list[tuple[int, int]]] = {}
        pieces = sorted(self._pieces(number, self.kinds[number]))
        merged = [next(same) for _, same in groupby(pieces, lambda piece: piece[1])]
        ends = [start for start, _ in merged[1:]] + [self.nbytes(number)]
        for (start, owner), stop in zip(merged, ends, strict=True):
            stretches.setdefault(owner, []).append((start, stop))
        return [stretches[owner] for owner in sorted(stretches)]

    def _pieces(self, number: int, kind: Any) -> Any:
        """Yield (start, (stage, ranks)) for stretches of a row that the same ranks hold."""
        depth = 1 + max(layer for one in self.kinds for layer in one["layers"])
        shares = [depth // self.stages] * self.stages
        for extra in range(depth % self.stages):
            shares[-2 - extra] += 1
        stage_of = [stage for stage, share in enumerate(shares) for _ in range(share)]
        for field in (one for one in fields(kind) if not one["name"].startswith("pad")):
            held = holders(field["sections"], self.shards)
            inside = [name for name, _ in field["axes"]]
            for layer in kind["layers"]:
                if kind["per_state"] or field["sharded"] not in inside:
                    for head in range(kind["heads"]):
                        start = self.place(number, field["name"], layer, head, 0).start
                        yield start, (stage_of[layer], held[head] if held else ())
                    continue
                at = inside.index(field["sharded"])
                sizes = [size for _, size in field["axes"]]
                row = prod(sizes[at + 1 :]) * WIDTHS.get(field["dtype"], 1)
                begin = self.place(number, field["name"], layer, 0, 0).start
                for outer in range(prod(sizes[:at])):
                    for nth, ranks in enumerate(held):
                        yield begin + (outer * len(held) + nth) * row, (stage_of[layer], ranks)

    def name(self, number: int, key: bytes, first: int, stop: int) -> str:
        """Return the name of a row of kind `number` with the tokens first .. stop - 1 of a span."""
        place = digest(struct.pack("<I", number) + key).hex()
        return f"{place}/{number}.{first}-{stop}"

    def write(self, folder: Path, name: str, row: bytes) -> None:
        """Write the objects of a row, and then the marks of the namespace."""
        for index, ranges in enumerate(self.objects(int(name[33:].partition(".")[0]))):
            payload = b"".join(row[start:stop] for start, stop in ranges)
            data = framed(self.namespace, digest(name.encode()), index, payload)
            put(folder / ROOT / self.tenant / self.namespace.hex() / name / str(index), data)
        cuts = [self.objects(number) for number in range(len(self.kinds))]
        about = {"model": "", "kinds": self.kinds, "span": self.span, "shards": self.shards}
        about["objects"] = [[sum(b - a for a, b in one) for one in cut] for cut in cuts]
        about["stages"] = self.stages
        for level, word in enumerate(LEVELS):
            mark = digest(canonical(self.levels[: level + 1]))
            text = canonical({"level": word} | (about if word == "format" else {}))
            data = framed(mark, digest(b"mark"), level, text)
            put(folder / ROOT / self.tenant / "marks" / mark.hex(), data)

    def read(self, folder: Path, name: str) -> bytes:
        """Read and verify the objects of a row."""
        number = int(name[33:].partition(".")[0])
        row = bytearray(self.nbytes(number))
        for index, ranges in enumerate(self.objects(number)):
            path = folder / ROOT / self.tenant / self.namespace.hex() / name / str(index)
            data = path.read_bytes()
            if data != framed(self.namespace, digest(name.encode()), index, data[64:]):
                raise ValueError(f"{path}: another object, or damaged bytes")
            data = data[64:]
            for start, stop in ranges:
                row[start:stop], data = data[: stop - start], data[stop - start :]
        return bytes(row)


def fields(kind: Any) -> list[Any]:
    return [field for group in kind["groups"] for plane in group for field in plane]


def width(field: Any) -> int:
    return int(prod(size for _, size in field["axes"])) * WIDTHS.get(field["dtype"], 1)


def holders(sections: list[Any], shards: int) -> list[tuple[int, ...]]:
    """Return, for each row of a sharded axis, the ranks that hold it."""
    ranks = range(shards)
    return [
        tuple(r for r in ranks if r == unit * shards // units or r * units // shards == unit)
        for units, rows, _ in sections
        for unit in range(units)
        for _ in range(rows)
    ]


def framed(namespace: bytes, row: bytes, number: int, payload: bytes) -> bytes:
    """Return an object: a header of 64 bytes, and its payload."""
    about = number, len(payload), namespace, row, zlib.crc32(payload)
    header = HEADER.pack(b"kvobject", VERSION, CRC32, *about)
    return header + struct.pack("<I", zlib.crc32(header)) + payload


def put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(f"{path.name}.new").write_bytes(data)
    path.with_name(f"{path.name}.new").replace(path)
