"""Suggestions for the name of a model that is not in the catalogue."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from kvatlas.models.known_models import catalogue

_PARTS = r"a\d+(?:\.\d+)?b(?![a-z])|\d+(?:\.\d+)*[bm]?(?![a-z])|[a-z]+|\d+"
_SIZE = r"(\d+(?:\.\d+)?)([bm])"
_MOST = 3


class _Name(NamedTuple):
    """A parsed model name.

    For `Qwen3-235B-A22B`, the family is `qwen`, the version `3`, the size 235 (billion
    parameters), and the parts are `qwen`, `3`, `235b` and `a22b`.
    """

    family: str
    version: str
    size: float | None
    parts: tuple[str, ...]


def similar_names(text: str) -> list[str]:
    """Return up to three catalogue names of the same family, nearest version and size first.

    If any name has the wanted version and size, only such names are returned. If the family
    is not in the catalogue, names with a similar spelling are returned.

    >>> similar_names("Qwen3-235B"), similar_names("Llama-70b")
    (['Qwen3-235B-A22B'], ['Llama-3.1-70B'])
    >>> similar_names("Qwen3-14B")
    ['Qwen3-8B', 'Qwen3-30B-A3B', 'Qwen3-32B']
    """
    import difflib  # only needed if a name is unknown

    wanted = _parsed(text.rpartition("/")[2])
    known = {name: _parsed(name) for name in catalogue()}
    families = {one.family for one in known.values()}
    family = difflib.get_close_matches(wanted.family, sorted(families), n=1, cutoff=0.7)
    related = [name for name, one in known.items() if family and one.family == family[0]]
    if not related:
        return difflib.get_close_matches(text, list(known), n=_MOST, cutoff=0.6)
    related.sort(key=lambda name: _distance(wanted, known[name]))
    exact = [name for name in related if _is_same(wanted, known[name])]
    return (exact or related)[:_MOST]


def _parsed(name: str) -> _Name:
    parts = tuple(re.findall(_PARTS, name.lower()))
    sizes = [float(n) * (1 if unit == "b" else 1e-3) for n, unit in _sizes(parts)]
    words = [part for part in parts if part.isalpha()]
    versions = [part for part in parts if re.fullmatch(r"\d+(?:\.\d+)*", part)]
    return _Name(
        words[0] if words else "", versions[0] if versions else "", max(sizes, default=None), parts
    )


def _sizes(parts: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return (number, unit) of each part that is a size, such as `235b`.

    Numbers of active parameters, such as `a22b`, are skipped.
    """
    return [found.groups() for part in parts if (found := re.fullmatch(_SIZE, part))]  # type: ignore[misc]


def _distance(wanted: _Name, known: _Name) -> tuple[float, ...]:
    """Return a sort key: difference in version, in size, and the negated number of shared parts."""
    version = abs(_number(wanted.version) - _number(known.version)) if wanted.version else 0.0
    size = 0.0
    if wanted.size:
        size = abs(math.log(wanted.size / known.size)) if known.size else 10.0
    shared = len(set(wanted.parts) & set(known.parts))
    return (version, size, -shared)


def _number(version: str) -> float:
    """Return a version as a number: 3.1 for `3.1` and `3.1.2`, 0 for no version."""
    return float(".".join(version.split(".")[:2]) or 0)


def _is_same(wanted: _Name, known: _Name) -> bool:
    same_version = not wanted.version or wanted.version == known.version
    return wanted.size is not None and wanted.size == known.size and same_version
