"""The order in which a request releases its cache entries.

An entry is the blocks of one span in one layer class. Entries released earlier are evicted first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvatlas.simulate.layer_classes import LayerClass
from kvatlas.simulate.traces import Ints

Ordered = tuple[Ints, Ints]
"""Entries in order of release, and the place of each: the index of its span in the request."""


def along_the_request(entries: list[Ints], parts: list[Ints], *, head_first: bool) -> Ordered:
    """Return the entries of all layer classes, from the end of the request to its beginning.

    With `head_first`, the order is reversed. `entries` contains the entries of each class, and
    `parts` the index of each entry's span in the request. Returns the ordered entries and their
    span indices.
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
    """Return entries in vLLM's order: first those freed during prefill, then the others by group.

    `entries` contains the entries of each class, and `parts` the index of each entry's span in the
    request. During prefill, windows and recurrent layers free the spans that they no longer need.
    `needs` contains, for each class, the first span that is still needed after the prompt. For a
    window, that is the first span that the next token sees. For recurrent layers, it is the span
    with the prompt's last token.

    With `in_parts`, only some states are kept, and prefill steps end at them. All groups then free
    the same state at the same time, the earliest state first. Otherwise every block has a state,
    and each group frees its states like the blocks of a window.
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
