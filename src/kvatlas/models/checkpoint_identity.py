"""Which weights a checkpoint has: caches of unlike weights are never mixed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from kvatlas.errors import AtlasError, Code

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""The name of a file in the hub's cache: a digest of what is in it."""
_SMALL = 64 << 20
"""Files up to here are read whole."""
_SAMPLE = 4096
_APART = 256 << 10
"""Bytes from one sample of a file to the next, where nothing is known of its tensors."""
_OF_A_TENSOR = 4
"""Samples of each tensor, where a file says where they are."""
_LONGEST_HEADER = 256 << 20


def weights_identity(folder: Path) -> str:
    """A digest of a checkpoint's files: their names, sizes, and bytes sampled from every tensor.

    Of files in the hub's cache, whose names there are digests of them, the names are enough. An
    index alone never is: fine-tunes share it.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "model.safetensors").write_bytes(bytes(10_000))
    >>> one = weights_identity(folder)
    >>> _ = (folder / "model.safetensors").write_bytes(bytes(9_999) + b"!")
    >>> one == weights_identity(folder), len(one)
    (False, 32)
    """
    files = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS)
    if not files:
        problem = (
            "It cannot be told which weights these are, and caches of unlike ones must not mix"
        )
        got = f"no file of weights in {folder}"
        hint = "Name the weights yourself, with a name that no others have: weights_identity"
        raise AtlasError(Code.BAD_CONFIG, problem, got=got, hint=hint)
    digest = blake2b(digest_size=16)
    for path in files:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        blob = path.resolve()
        if blob.parent.name == "blobs" and _BLOB.fullmatch(blob.name):
            digest.update(blob.name.encode())
            continue
        for sample in _samples(path):
            digest.update(sample)
    return digest.hexdigest()


def _samples(path: Path) -> Iterator[bytes]:
    """All of a small file; of a large one, samples of every tensor, or all along it."""
    nbytes = path.stat().st_size
    with path.open("rb") as file:
        if nbytes <= _SMALL:
            yield file.read()
            return
        places = range(0, nbytes, _APART)
        for at in _tensor_places(file, nbytes) or places:
            yield os.pread(file.fileno(), _SAMPLE, at)


def _tensor_places(file: BinaryIO, nbytes: int) -> list[int]:
    """Where to look into each tensor of a safetensors file; nowhere in one of another kind."""
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(_LONGEST_HEADER, nbytes - 8):
        return []
    try:
        header = msgspec.json.decode(file.read(length), type=dict[str, dict[str, Any]])
        spans = [about["data_offsets"] for name, about in header.items() if name != "__metadata__"]
        edges = sorted((8 + length + int(start), 8 + length + int(stop)) for start, stop in spans)
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return []
    places = [0]
    for start, stop in edges:
        step = max(_SAMPLE, (stop - start) // _OF_A_TENSOR)
        places += range(start, stop, step)
    return [at for at in places if 0 <= at < nbytes]
