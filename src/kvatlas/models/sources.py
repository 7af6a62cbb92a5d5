"""Load a config from a path, a dict, a transformers config, a catalogue name or a hub id.

Each of them becomes a `Source`: a mapping with a name and an origin.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kvatlas.errors import AtlasError, Code
from kvatlas.models.known_models import CatalogueEntry, find
from kvatlas.models.mistral_params import from_mistral, is_mistral

if TYPE_CHECKING:
    from pathlib import Path

LARGEST_FILE = 16 * 2**20
"""Limit on the bytes of a config; real configs have a few thousand."""

LARGEST_INDEX = 128 * 2**20
"""Limit on the bytes of a safetensors index; the largest models list half a million tensors."""

LONGEST_SILENCE = 0.8
"""Seconds to wait for a response from the hub before it counts as unreachable."""

_HUB_ID = r"[\w.-]+/[\w.-]+"
_HINT = "Pass the path of the model's config.json"


class Source(NamedTuple):
    """A config as a mapping, and its origin."""

    values: Mapping[str, Any]
    name: str = ""
    origin: str = ""
    confidence: str = ""
    path: Path | None = None
    """The config's file, if it was read from one. The checkpoint's other files are next to it."""


def find_config(source: Any) -> Source:
    """Return the config of a path, a mapping, a transformers config, a catalogue name or a hub id.

    >>> find_config("google/gemma-2-2b").name
    'Gemma-2-2b'
    """
    if isinstance(source, CatalogueEntry):
        return _from_entry(source)
    if isinstance(source, str | os.PathLike):
        return _from_name(source)
    values = source.to_dict() if callable(getattr(source, "to_dict", None)) else source
    if isinstance(values, Mapping):
        return Source(from_mistral(values) if is_mistral(values) else values)
    raise AtlasError(
        Code.UNREADABLE,
        "A model must be a path, mapping, transformers config, catalogue name or hub id",
        got=type(source).__name__,
        hint=_HINT,
    )


def _from_name(source: str | os.PathLike[str]) -> Source:
    from pathlib import Path  # slow to import, and only needed to read a file

    path, text = Path(source), str(source)
    there = not isinstance(source, str) or text.endswith(".json") or (text != "" and _exists(path))
    if there:
        return _from_file(path)._replace(origin=text)
    if (entry := find(text)) is not None:
        return _from_entry(entry)
    if re.fullmatch(_HUB_ID, text):
        return _from_file(_from_hub(text))._replace(name=text, origin=f"hub: {text}")
    from kvatlas.models.similar_names import similar_names  # only needed for unknown names

    close = similar_names(text)
    raise AtlasError(
        Code.UNKNOWN_MODEL,
        "There is no such file, and no model of this name in the catalogue",
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
    """Return the config in file `path`, or in the config.json of folder `path`.

    A folder without a config.json may have Mistral's params.json. The name of the model is taken
    from the path.
    """
    if path.is_dir():
        names = ("config.json", "params.json")
        path = next((path / one for one in names if (path / one).exists()), path / names[0])
    values = _json_object(path)
    if is_mistral(values):
        values = from_mistral(values)
    whole = path.name in ("config.json", "params.json")
    name = path.parent.name if whole else path.stem.removesuffix("_config")
    return Source(_with_quantisation(values, path), name, path=path)


def _json_object(path: Path, largest: int = LARGEST_FILE) -> dict[str, Any]:
    """Return the object in an untrusted JSON file of at most `largest` bytes."""
    import json  # slow to import, and only needed for a file

    try:
        if path.exists() and not path.is_file():
            raise _unreadable(path, "not a regular file", "Pass the path of a config.json")
        with path.open("rb") as file:
            text = file.read(largest + 1)
        if len(text) > largest:
            raise _unreadable(
                path, f"larger than {largest >> 20} MiB", "Pass the path of a config.json"
            )
        # The standard library's parser accepts Infinity, which some real configs contain.
        values = json.loads(text)
    except AtlasError:
        raise
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise _unreadable(path, reason, "Check the path and its permissions") from error
    except (ValueError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise _unreadable(path, reason[:200], "Download the file again") from error
    if not isinstance(values, dict):
        raise _unreadable(
            path,
            f"a JSON {type(values).__name__} instead of an object",
            "Pass the path of a config.json",
        )
    return values


def _with_quantisation(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Add ModelOpt's hf_quant_config.json to a config that has no quantisation section."""
    found = _sibling(path, "hf_quant_config.json")
    if found is None or values.get("quantization_config") is not None:
        return values
    section = _json_object(found)
    return {**values, "quantization_config": {"quant_method": "modelopt", **section}}


class CheckpointSize(NamedTuple):
    """The bytes of all tensors of a checkpoint, and the kind of file that contains this number."""

    bytes: int
    source: str


def checkpoint_size(source: Source) -> CheckpointSize | None:
    """Return the bytes of all tensors from a safetensors index or file next to the config.

    Returns None if there is neither, or if it has no valid total.
    """
    if source.path is None:
        return None
    if found := _sibling(source.path, "model.safetensors.index.json"):
        total = _index_total(found)
        return CheckpointSize(total, "safetensors index") if total else None
    if found := _sibling(source.path, "model.safetensors"):
        total = _tensor_bytes(found)
        return CheckpointSize(total, "safetensors file") if total else None
    return None


def _index_total(index: Path) -> int | None:
    metadata = _json_object(index, LARGEST_INDEX).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, bool) or not isinstance(total, int | float):  # some tools write a float
        return None
    return int(total) if 0 < total < 2**53 else None


def _tensor_bytes(file: Path) -> int | None:
    """Return the bytes after the header of a safetensors file; None if it is not such a file."""
    try:
        with file.open("rb") as opened:
            start = opened.read(9)
        rest = file.stat().st_size - 8
    except OSError:
        return None
    header = int.from_bytes(start[:8], "little")
    return rest - header if start[8:] == b"{" and 0 < header < rest else None


def _sibling(path: Path, name: str) -> Path | None:
    """Return the file `name` next to config.json, or `X_name` next to `X_config.json`.

    Returns None if there is no such file.
    """
    file = path.with_name(path.name.removesuffix("config.json") + name)
    return file if path.name.endswith("config.json") and file.is_file() else None


def _unreadable(path: Path, reason: str, hint: str) -> AtlasError:
    problem = "The file cannot be read, or does not contain a JSON object"
    return AtlasError(Code.UNREADABLE, problem, got=f"{path}: {reason}", hint=hint)


def _silence(name: str) -> Exception | None:
    """Return the reason why the hub is unreachable, or None if it responds.

    Any response counts, even an HTTP error. Without this check, huggingface_hub would retry an
    unreachable hub for half a minute. The request runs in a thread, because a DNS lookup has no
    timeout.
    """
    import threading
    import urllib.error
    import urllib.request  # slow to import, and only needed for a hub id

    address = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if not address.startswith(("https://", "http://")):
        return ValueError("HF_ENDPOINT is not a web address")
    url = f"{address.rstrip('/')}/{name}/resolve/main/config.json"
    request = urllib.request.Request(url, method="HEAD")  # noqa: S310
    failures: list[Exception] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(request, timeout=LONGEST_SILENCE).close()  # noqa: S310
        except urllib.error.HTTPError:
            return  # an HTTP error is a response
        except Exception as error:
            failures.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(LONGEST_SILENCE)
    if asking.is_alive():
        return TimeoutError(f"{address} did not respond within {LONGEST_SILENCE} s")
    return failures[0] if failures else None


def _from_hub(name: str) -> Path:
    hint = "Download the model's config.json and pass its path"
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise AtlasError(
            Code.NO_HUB,
            "huggingface_hub is not installed",
            got=f"{name!r}, which is neither a path nor in the catalogue",
            hint="Run pip install 'kvatlas[transformers]', which includes huggingface_hub; or "
            "download the model's config.json and pass its path",
        ) from error
    from pathlib import Path  # slow to import, and only needed to read a file

    silence = _silence(name)
    try:
        # If the hub is unreachable, use a config that was downloaded before.
        return Path(hub.hf_hub_download(name, "config.json", local_files_only=silence is not None))
    except Exception as error:
        # The errors of huggingface_hub have no common base class.
        cause = silence or error
        reason = f"{type(cause).__name__}: {str(cause)[:200]}"
        problem = "The model hub did not return the config"
        if silence:
            problem = "The model hub cannot be reached"
        raise AtlasError(Code.NO_HUB, problem, got=f"{name!r}: {reason}", hint=hint) from error
