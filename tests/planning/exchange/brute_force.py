"""The bytes of documents by brute force: every element is visited, and every byte is a number.

This reads documents as plain JSON, and imports nothing of kvatlas.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count, product
from pathlib import Path
from typing import Any

ITEMS = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of an item; those of all other dtypes have one byte."""

Byte = tuple[int, int]
"""A region and the position of a byte in it."""
Elements = dict[tuple[Any, ...], tuple[Byte, int]]
"""The first byte and the bytes of each element, by its state, row and other coordinates."""
Part = tuple[set[int], Elements]
"""The rows of a part on a rank, and its elements."""


class End:
    """A rank of a document, with the block tables of a request."""

    def __init__(self, folder: Path, one: dict[str, Any]) -> None:
        self.document = json.loads((folder / one["document"]).read_bytes())
        tables = json.loads((folder / one["tables"]).read_bytes())["tables"]
        self.tables = {table["group"]: table for table in tables}
        self.rank = one["rank"]

    def fields(self) -> Iterator[tuple[str, str]]:
        for layer in self.document["layers"]:
            for field in layer["fields"]:
                yield layer["name"], field["name"]

    def parts(self, layer: str, name: str) -> Iterator[Part]:
        """The parts of a field that the rank holds, in the order of the document."""
        for part in self.document["layers"]:
            for field in part["fields"]:
                held = self.document["shards"][field["shard"]]["ranks"][self.rank]
                if (part["name"], field["name"]) == (layer, name) and held is not None:
                    rows = [row for start, length in held for row in range(start, start + length)]
                    yield set(rows), dict(self._elements(part["group"], field, rows))

    def _elements(
        self, group: int, field: dict[str, Any], rows: list[int]
    ) -> Iterator[tuple[tuple[Any, ...], tuple[Byte, int]]]:
        axis = self.document["shards"][field["shard"]]["axis"]
        others = sorted(set(field["axes"]) - {"B", "N", axis})
        item = ITEMS.get(field["dtype"], 1)
        walks = [list(walk(field["axes"][one])) for one in others]
        states = list(walk(field["axes"].get("N", [[1, 0]])))
        sharded = list(walk(field["axes"][axis])) if axis else [0]
        ((_, block_stride),) = field["axes"]["B"]
        for state, block, within in self._states(group, len(states)):
            for row, distance in zip(rows, sharded, strict=True):
                for places in product(*(range(len(steps)) for steps in walks)):
                    at = field["offset"] + block * block_stride + states[within] + distance
                    at += sum(steps[place] for steps, place in zip(walks, places, strict=True))
                    yield (state, row, *places), ((field["region"], at), item)

    def _states(self, group: int, many: int) -> Iterator[tuple[int, int, int]]:
        """(number, block id, place in the block) of each state of the request on this rank."""
        if group not in self.tables:  # readers need no tables of fields that only one rank holds
            return
        own, table = self.document["groups"][group], self.tables[group]
        (first, stop), blocks = table["tokens"], table["blocks"]
        slots = ((block, within) for block in blocks for within in range(many))
        if first == stop:
            return
        if own["holds"] == "state":
            yield stop, blocks[0], 0
        elif own["holds"] == "ring":
            for token in list(range(first, stop))[-many:]:
                yield token, blocks[0], token % many
        else:
            per_state = own["tokens"] // many
            for token in count():
                state, place = divmod(token, per_state)
                if token == stop:
                    return
                if place == per_state - 1 and state % own["context"] == self.rank % own["context"]:
                    block, within = next(slots)
                    if token >= first:
                        yield state, block, within


def walk(steps: list[list[int]]) -> Iterator[int]:
    """The distance of each coordinate of an axis from its first."""
    for places in product(*(range(size) for size, _ in steps)):
        yield sum(place * stride for place, (_, stride) in zip(places, steps, strict=True))


def runs(end: End, layer: str, field: str, rows: list[int] | None) -> list[list[int]]:
    found: set[Byte] = set()
    for _, elements in end.parts(layer, field):
        for (_, row, *_), ((region, at), item) in elements.items():
            if rows is None or rows[0] <= row < rows[1]:
                found |= {(region, at + n) for n in range(item)}
    return joined([(*byte,) for byte in found])


def copy(source: End, destination: End) -> list[list[int]]:
    found: list[tuple[int, ...]] = []
    for layer, field in sorted(set(destination.fields())):
        held: Elements = {}
        read: set[int] = set()
        for rows, elements in source.parts(layer, field):
            held |= {key: place for key, place in elements.items() if key[1] not in read}
            read |= rows  # later parts are not read for these rows, whatever the tables list
        for _, elements in destination.parts(layer, field):
            for key in elements.keys() & held.keys():
                ((here, at), item), ((there, to), _) = held[key], elements[key]
                found += [(here, at + n, there, to + n) for n in range(item)]
    return joined(found)


def shares_bytes(document: dict[str, Any]) -> bool:
    """Whether two items share a byte, other than items of two groups in blocks of the same id."""
    owners: dict[Byte, set[tuple[int, int]]] = {}
    for layer in document["layers"]:
        for field in layer["fields"]:
            ((blocks, stride),) = field["axes"]["B"]
            steps = [step for axis, own in field["axes"].items() if axis != "B" for step in own]
            for block, within in product(range(blocks), walk(steps)):
                at = field["offset"] + block * stride + within
                for byte in range(at, at + ITEMS.get(field["dtype"], 1)):
                    own = owners.setdefault((field["region"], byte), set())
                    if any(group == layer["group"] or other != block for group, other in own):
                        return True
                    own.add((layer["group"], block))
    return False


def joined(found: list[tuple[int, ...]]) -> list[list[int]]:
    """Runs of bytes, sorted by the last region and position: [region, offset, ..., length]."""
    out: list[list[int]] = []
    for one in sorted(found, key=lambda one: one[-2:]):
        before = out[-1] if out else []
        follows = before and all(
            at == last + (before[-1] if n % 2 else 0)
            for n, (at, last) in enumerate(zip(one, before, strict=False))
        )
        if follows:
            before[-1] += 1
        else:
            out.append([*one, 1])
    return out


def result(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """The answer of a case of the corpus that has runs."""
    if "copy" in case:
        return {"runs": copy(*(End(folder, one) for one in case["copy"]))}
    return {"runs": runs(End(folder, case), case["layer"], case["field"], case["rows"])}
