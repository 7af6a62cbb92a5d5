"""Merge notes and errors that several plans share, so that each is printed once."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBER = re.compile(r"\d[\d,.]*\d|\d")
_MOST_DIFFERENCES = 1
"""How many numbers may differ between messages that are merged into one."""


def merged_notes(messages: Iterable[tuple[str, str]]) -> list[str]:
    """Return texts for (label, message) pairs; merge messages that differ in at most one number.

    >>> merged_notes([("tp 8", "Got 20 heads, tp 8."), ("tp 16", "Got 20 heads, tp 16.")])
    ['tp 8, tp 16: Got 20 heads, tp 8 and 16.']
    >>> merged_notes([("", "8,192 tokens exceed 4,096."), ("", "16,384 tokens exceed 4,096.")])
    ['8,192 and 16,384 tokens exceed 4,096.']
    """
    groups: list[list[tuple[str, str]]] = []
    for label, text in messages:
        for group in groups:
            texts = [known for _, known in group]
            if _differences([*texts, text]) <= _MOST_DIFFERENCES:
                group.append((label, text))
                break
        else:
            groups.append([(label, text)])
    return [_joined(group) for group in groups]


def _differences(texts: list[str]) -> int:
    """Return how many numbers differ between texts.

    If words differ, the result exceeds `_MOST_DIFFERENCES`, so the texts are not merged.
    """
    if len({_NUMBER.sub("0", text) for text in texts}) > 1:
        return _MOST_DIFFERENCES + 1
    return sum(len(set(values)) > 1 for values in _numbers(texts))


def _numbers(texts: list[str]) -> list[tuple[str, ...]]:
    """Return one tuple for each position of a number: the number at that position in every text."""
    return list(zip(*(_NUMBER.findall(text) for text in texts), strict=True))


def _joined(group: list[tuple[str, str]]) -> str:
    labels = list(dict.fromkeys(label for label, _ in group if label))
    texts = [text for _, text in group]
    values = iter([_listed(list(dict.fromkeys(numbers))) for numbers in _numbers(texts)])
    merged = _NUMBER.sub(lambda _: next(values), texts[0])
    return f"{', '.join(labels)}: {merged}" if labels else merged


def _listed(words: list[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
