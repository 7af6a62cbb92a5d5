"""The built-in catalogue: models that load by name, without a file or network access.

An entry contains the keys of the model's config that determine its caches and weights. The
functions that read config files also read entries. The loaded model includes the entry's source
and confidence.

Lists with one entry per layer are run-length encoded: `["mamba*5", "attention"]` expands
to six entries.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from kvatlas.models.package_data import package_data


class CatalogueEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model: its hub id, the source of its numbers, and its config.

    >>> entry = catalogue()["Granite-4.0-h-small"]
    >>> entry.config["layer_types"][:3], len(entry.expanded()["layer_types"])
    (['mamba*5', 'attention', 'mamba*9'], 40)
    """

    name: str
    repo: str
    source: tuple[str, ...]
    confidence: str
    config: dict[str, Any]
    note: str = ""

    def expanded(self) -> dict[str, Any]:
        """Return the config with its run-length encoded lists expanded."""
        return {key: _expand(value) for key, value in self.config.items()}


@functools.cache
def catalogue() -> Mapping[str, CatalogueEntry]:
    """Return all entries of the catalogue, by model name.

    >>> catalogue()["Qwen3.5-397B-A17B"].repo
    'Qwen/Qwen3.5-397B-A17B'
    """
    entries = msgspec.json.decode(package_data("catalogue.json"), type=list[CatalogueEntry])
    return MappingProxyType({entry.name: entry for entry in entries})


def find(name: str) -> CatalogueEntry | None:
    """Return the entry with this name or hub repository, ignoring case; None if there is none.

    >>> find("google/gemma-2-2b").name
    'Gemma-2-2b'
    """
    entries, wanted = catalogue().values(), name.lower()
    return next((x for x in entries if wanted in (x.name.lower(), x.repo.lower())), None)


def _expand(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _expand(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [item for run in value for item in _run(run)]
    return value


def _run(item: Any) -> list[Any]:
    """Return the list that a string `word*count` encodes. A word of digits becomes an integer.

    For any other item, return a list that contains only this item.
    """
    word, star, count = item.rpartition("*") if isinstance(item, str) else ("", "", "")
    if not (star and count.isdigit()):
        return [_expand(item)]
    return [int(word) if word.isdigit() else word] * int(count)
