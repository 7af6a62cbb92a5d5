"""The built-in catalogue: models that load by name, without a file or a network.

An entry is a config in its family's own keys, cut down to what decides a cache, so
that it goes through the same readers as a file. Its source and confidence travel
with the model.

Lists with an entry for each layer are written as runs: `["mamba*5", "attention"]`
stands for six words.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any

import msgspec


class CatalogueEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model: its hub id, where its numbers come from, and its config.

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
        """The config with its runs written out."""
        return {key: _expand(value) for key, value in self.config.items()}


@functools.cache
def catalogue() -> Mapping[str, CatalogueEntry]:
    """All entries by name.

    >>> catalogue()["Qwen3.5-397B-A17B"].repo
    'Qwen/Qwen3.5-397B-A17B'
    """
    text = (resources.files("kvatlas.models") / "catalogue.json").read_bytes()
    entries = msgspec.json.decode(text, type=list[CatalogueEntry])
    return MappingProxyType({entry.name: entry for entry in entries})


def find(name: str) -> CatalogueEntry | None:
    """The entry called `name`, or of the hub repository `name`, in any case.

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
    """`word*count` as that many words, or numbers where the word is one."""
    word, star, count = item.rpartition("*") if isinstance(item, str) else ("", "", "")
    if not (star and count.isdigit()):
        return [_expand(item)]
    return [int(word) if word.isdigit() else word] * int(count)
