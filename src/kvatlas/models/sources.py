"""Where a model's config comes from: whatever its owner has at hand.

A path, a dict, a transformers object, a catalogue name and a hub id all become one
mapping here, with a name and a word about its origin.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvatlas.errors import AtlasError, Code
from kvatlas.models.known_models import CatalogueEntry, catalogue, find

LARGEST_FILE = 16 * 2**20
"""Bytes of the largest config that is read; real ones have a few thousand."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HINT = "Pass the path of its config.json"


class Source(NamedTuple):
    """A config as a mapping, and where it comes from."""

    values: Mapping[str, Any]
    name: str = ""
    origin: str = ""
    confidence: str = ""


def find_config(source: Any) -> Source:
    """The config of a path, a mapping, a transformers object, a catalogue name or a hub id.

    >>> find_config("google/gemma-2-2b").name
    'Gemma-2-2b'
    """
    if isinstance(source, CatalogueEntry):
        return _from_entry(source)
    if isinstance(source, str | os.PathLike):
        return _from_name(source)
    values = source.to_dict() if callable(getattr(source, "to_dict", None)) else source
    if isinstance(values, Mapping):
        return Source(values)
    raise AtlasError(
        Code.UNREADABLE,
        "This is no path, mapping, transformers config, catalogue name or hub id",
        got=type(source).__name__,
        hint=_HINT,
    )


def _from_name(source: str | os.PathLike[str]) -> Source:
    path, text = Path(source), str(source)
    there = not isinstance(source, str) or text.endswith(".json") or (text != "" and _exists(path))
    if there:
        return _from_file(path)._replace(origin=text)
    if (entry := find(text)) is not None:
        return _from_entry(entry)
    if _HUB_ID.fullmatch(text):
        return _from_file(_from_hub(text))._replace(name=text, origin=f"hub: {text}")
    close = difflib.get_close_matches(text, list(catalogue()), n=3, cutoff=0.4)
    raise AtlasError(
        Code.UNKNOWN_MODEL,
        "No model of that name in the catalogue, and no such file",
        got=repr(text),
        hint=f"Did you mean {', '.join(close)}?" if close else _HINT,
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _from_entry(entry: CatalogueEntry) -> Source:
    values = {"dtype": "bfloat16", **entry.expanded()}
    return Source(values, entry.name, "; ".join(entry.source), entry.confidence)


def _from_file(path: Path) -> Source:
    """The mapping in a config.json, or in the one of a folder, and a name for it."""
    if path.is_dir():
        path = path / "config.json"
    try:
        if path.exists() and not path.is_file():
            raise _unreadable(path, "not a plain file", "Pass a config.json")
        with path.open("rb") as file:
            text = file.read(LARGEST_FILE + 1)
        if len(text) > LARGEST_FILE:
            limit = f"more than {LARGEST_FILE >> 20} MiB"
            raise _unreadable(path, limit, "Pass the config.json alone")
        # The standard library's reader takes the Infinity that some real configs hold.
        values = json.loads(text)
    except AtlasError:
        raise
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise _unreadable(path, reason, "Check the path") from error
    except (ValueError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise _unreadable(path, reason[:200], "Fetch the file again") from error
    if not isinstance(values, dict):
        raise _unreadable(path, f"a {type(values).__name__}", "Pass a config.json, not its parts")
    name = path.parent.name if path.name == "config.json" else path.stem.removesuffix("_config")
    return Source(values, name)


def _unreadable(path: Path, reason: str, hint: str) -> AtlasError:
    problem = "A config cannot be read, or is not one JSON object"
    return AtlasError(Code.UNREADABLE, problem, got=f"{path}: {reason}", hint=hint)


def _from_hub(name: str) -> Path:
    hint = "Download its config.json and pass the path"
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise AtlasError(
            Code.NO_HUB,
            "huggingface_hub is not installed",
            got=f"{name!r}, which is no path and not in the catalogue",
            hint=f"Install huggingface_hub, or: {hint.lower()}",
        ) from error
    try:
        return Path(hub.hf_hub_download(name, "config.json"))
    except Exception as error:
        # Its errors have many bases: whatever it raises, the config did not come.
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise AtlasError(Code.NO_HUB, got=f"{name!r}: {reason}", hint=hint) from error
