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
"""The first byte and the number of bytes of each element, by its coordinates in the model."""


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

    def parts(self, layer: str, name: str) -> Iterator[Elements]:
        """The elements of each part of a field that the rank holds, in the order of the parts."""
        for part in self.document["layers"]:
            for field in part["fields"]:
                held = self.document["shards"][field["shard"]]["ranks"][self.rank]
                if (part["name"], field["name"]) == (layer, name) and held is not None:
                    yield dict(self._elements(part["group"], field, held))

    def _elements(
        self, group: int, field: dict[str, Any], held: list[list[int]]
    ) -> Iterator[tuple[tuple[Any, ...], tuple[Byte, int]]]:
        axis = self.document["shards"][field["shard"]]["axis"]
        rows = [row for start, length in held for row in range(start, start + length)]
        others = sorted(set(field["axes"]) - {"B", "N"})
        item = ITEMS.get(field["dtype"], 1)
        walks = [list(walk(field["axes"][one])) for one in others]
        states = list(walk(field["axes"].get("N", [[1, 0]])))
        ((_, block_stride),) = field["axes"]["B"]
        for state, block, within in self._states(group, len(states)):
            for places in product(*(range(len(steps)) for steps in walks)):
                at = field["offset"] + block * block_stride + states[within]
                at += sum(steps[place] for steps, place in zip(walks, places, strict=True))
                coordinates = [
                    rows[place] if one == axis else place
                    for one, place in zip(others, places, strict=True)
                ]
                row = None if axis else 0
                yield (state, row, *coordinates), ((field["region"], at), item)

    def _states(self, group: int, many: int) -> Iterator[tuple[int, int, int]]:
        """(number, block id, place in the block) of each state of the request on this rank."""
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
    shards = {
        part["fields"][place]["shard"]
        for part in end.document["layers"]
        for place, one in enumerate(part["fields"])
        if (part["name"], one["name"]) == (layer, field)
    }
    axes = {end.document["shards"][shard]["axis"] for shard in shards}
    (axis,) = axes
    names = next(
        sorted(set(one["axes"]) - {"B", "N"})
        for part in end.document["layers"]
        for one in part["fields"]
        if (part["name"], one["name"]) == (layer, field)
    )
    found: set[Byte] = set()
    for elements in end.parts(layer, field):
        for (_, _, *place), ((region, at), item) in elements.items():
            row = place[names.index(axis)] if axis else 0
            if rows is None or rows[0] <= row < rows[1]:
                found |= {(region, at + n) for n in range(item)}
    return joined([(*byte,) for byte in found])


def copy(source: End, destination: End) -> list[list[int]]:
    found: list[tuple[int, ...]] = []
    for layer, field in sorted(set(destination.fields())):
        held: Elements = {}
        for elements in source.parts(layer, field):
            held = elements | held  # the first part that has an element
        if not held:
            continue
        for elements in destination.parts(layer, field):
            for key in elements.keys() & held.keys():
                ((here, at), item), ((there, to), _) = held[key], elements[key]
                found += [(here, at + n, there, to + n) for n in range(item)]
    return joined(found)


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
