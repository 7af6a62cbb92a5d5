"""The order in which a request releases its entries. Entries released earlier are evicted first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvatlas.pool.simulation.layer_classes import LayerClass
from kvatlas.pool.traces import Ints

Ordered = tuple[Ints, Ints]
"""Entries in order of release, and the place of each: the index of its span in the request."""


def along_the_request(entries: list[Ints], parts: list[Ints], *, head_first: bool) -> Ordered:
    """Return the entries of all layer classes, from the end of the request to its beginning.

    With `head_first`, the order is reversed. `entries` and `parts` contain, for each class, its
    entries and the index of each entry's span in the request.
    """
    if len(parts) == 1:
        entry, place = entries[0], parts[0]
        return (entry, place) if head_first else (entry[::-1], place[::-1])
    # A checkpoint is useless without attention's blocks before it, so it is released first.
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
    """Return entries in vLLM's order: those freed during prefill, then the rest group by group.

    During prefill, windows and recurrent layers free the places that they no longer need. `needs`
    holds, for each class, the first place that is still needed at the end of the prompt: for a
    window the first that the next token sees, for states the block with the prompt's last token.

    If states are kept at every block, they are freed like the blocks of a window. Otherwise
    (`in_parts`), the prompt is computed in parts that end at the kept states, and a state is freed
    in all groups when the part after the next one begins.
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
