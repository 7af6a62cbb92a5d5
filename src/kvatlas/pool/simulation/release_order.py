"""The order in which a request releases its entries. Entries released first are evicted first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvatlas.pool.simulation.layer_classes import LayerClass
from kvatlas.pool.traces import Ints

Ordered = tuple[Ints, Ints]
"""Entries, and their places along the request."""


def along_the_request(entries: list[Ints], parts: list[Ints], *, head_first: bool) -> Ordered:
    """Return the entries of all classes by position, from the end or from the head."""
    if len(parts) == 1:
        entry, place = entries[0], parts[0]
        return (entry, place) if head_first else (entry[::-1], place[::-1])
    # A checkpoint is of no use without the blocks before it, so it goes before they do.
    joined, places = np.concatenate(entries[::-1]), np.concatenate(parts[::-1])
    order = np.argsort(places if head_first else -places, kind="stable")
    return joined[order], places[order]


def by_group(
    classes: Sequence[LayerClass],
    needs: Sequence[int],
    entries: list[Ints],
    parts: list[Ints],
    *,
    in_parts: bool,
) -> Ordered:
    """Return entries in vLLM's order: those that windows and states freed, then group by group.

    `needs` are the first places that are still needed at the end of the prompt. For a window, the
    next token needs them. For states, it is the block with the prompt's last token. States at
    every block are freed like a window's blocks. If states are few, the prompt is computed in
    parts that end at them (`in_parts`). Each state is then freed, in all groups, when the part
    after the next one begins.
    """
    passed: list[Ordered] = []
    left: list[Ordered] = []
    last: list[Ordered] = []
    for one, need, entry, place in zip(classes, needs, entries, parts, strict=True):
        behind = 0 if one.needs == "all" else int(place.searchsorted(need))
        if behind and one.needs == "state" and in_parts:
            passed.append((entry[:behind], place[:behind]))
        elif behind:
            left.append((entry[behind - 1 :: -1], place[behind - 1 :: -1]))
        if behind < len(place):
            last.append((entry[behind:][::-1], place[behind:][::-1]))
    if len(passed) > 1:
        joined, places = _joined(passed)
        order = places.argsort(kind="stable")
        passed = [(joined[order], places[order])]
    return _joined(passed + left + last or [(entries[0], parts[0])])


def _joined(ordered: list[Ordered]) -> Ordered:
    return np.concatenate([one for one, _ in ordered]), np.concatenate([two for _, two in ordered])
