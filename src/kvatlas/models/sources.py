"""Where a model's config comes from: whatever its owner has at hand.

A path, a dict, a transformers object, a catalogue name and a hub id all become one
mapping here, with a name and a word about its origin.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvatlas.errors import AtlasError, Code
from kvatlas.models.known_models import CatalogueEntry, find
from kvatlas.models.similar_names import similar_names

LARGEST_FILE = 16 * 2**20
"""Bytes of the largest config that is read; real ones have a few thousand."""

LARGEST_INDEX = 128 * 2**20
"""Bytes of the largest index of tensors: half a million names of a thousand experts' parts."""

LONGEST_SILENCE = 0.8
"""Seconds in which a hub says something, or is taken to be out of reach."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HINT = "Pass the path of its config.json"


class Source(NamedTuple):
    """A config as a mapping, and where it comes from."""

    values: Mapping[str, Any]
    name: str = ""
    origin: str = ""
    confidence: str = ""
    path: Path | None = None
    """The config's file, where it is one: a checkpoint's other files lie beside it."""


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
    close = similar_names(text)
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
    values = _json_object(path)
    name = path.parent.name if path.name == "config.json" else path.stem.removesuffix("_config")
    return Source(_with_quantisation(values, path), name, path=path)


def _json_object(path: Path, largest: int = LARGEST_FILE) -> dict[str, Any]:
    """The mapping in a JSON file that a stranger may have written."""
    try:
        if path.exists() and not path.is_file():
            raise _unreadable(path, "not a plain file", "Pass a config.json")
        with path.open("rb") as file:
            text = file.read(largest + 1)
        if len(text) > largest:
            limit = f"more than {largest >> 20} MiB"
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
    return values


def _with_quantisation(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """A config with what ModelOpt wrote into a file of its own, where it says nothing itself."""
    beside = _sibling(path, "hf_quant_config.json")
    if beside is None or values.get("quantization_config") is not None:
        return values
    section = _json_object(beside)
    return {**values, "quantization_config": {"quant_method": "modelopt", **section}}


def checkpoint_bytes(source: Source) -> int | None:
    """The bytes of all tensors, where a safetensors index beside the config gives them."""
    beside = _sibling(source.path, "model.safetensors.index.json") if source.path else None
    if beside is None:
        return None
    metadata = _json_object(beside, LARGEST_INDEX).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, bool) or not isinstance(total, int | float):  # some tools write a float
        return None
    return int(total) if 0 < total < 2**53 else None


def _sibling(path: Path, name: str) -> Path | None:
    """The file called `name` beside a config.json, `X_name` beside `X_config.json`."""
    beside = path.with_name(path.name.removesuffix("config.json") + name)
    return beside if path.name.endswith("config.json") and beside.is_file() else None


def _unreadable(path: Path, reason: str, hint: str) -> AtlasError:
    problem = "A config cannot be read, or is not one JSON object"
    return AtlasError(Code.UNREADABLE, problem, got=f"{path}: {reason}", hint=hint)


def _silence(name: str) -> Exception | None:
    """Why the hub gives no answer at all, if so: its own library tries for half a minute.

    Whatever it answers is an answer. The question is asked in a thread, since looking up an
    address cannot be given a time.
    """
    import urllib.error
    import urllib.request  # slow to load, and only a hub id asks for it

    address = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if not address.startswith(("https://", "http://")):
        return ValueError("HF_ENDPOINT is no web address")
    url = f"{address.rstrip('/')}/{name}/resolve/main/config.json"
    question = urllib.request.Request(url, method="HEAD")  # noqa: S310
    failures: list[Exception] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(question, timeout=LONGEST_SILENCE).close()  # noqa: S310
        except urllib.error.HTTPError:
            return  # refused by somebody who is there
        except Exception as error:
            failures.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(LONGEST_SILENCE)
    if asking.is_alive():
        return TimeoutError(f"{address} does not answer")
    return failures[0] if failures else None


def _from_hub(name: str) -> Path:
    hint = "Download its config.json and pass the path"
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise AtlasError(
            Code.NO_HUB,
            "huggingface_hub is not installed",
            got=f"{name!r}, which is no path and not in the catalogue",
            hint="Run pip install 'kvatlas[transformers]', which includes huggingface_hub; or "
            "download the model's config.json and pass its path",
        ) from error
    silence = _silence(name)
    try:
        # Out of reach, what was downloaded before is still there.
        return Path(hub.hf_hub_download(name, "config.json", local_files_only=silence is not None))
    except Exception as error:
        # Its errors have many bases: whatever it raises, the config did not come.
        cause = silence or error
        reason = f"{type(cause).__name__}: {str(cause)[:200]}"
        raise AtlasError(Code.NO_HUB, got=f"{name!r}: {reason}", hint=hint) from error
