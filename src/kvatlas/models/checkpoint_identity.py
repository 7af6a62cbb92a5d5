"""Identify a checkpoint's weights, so that caches of different weights are never mixed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from kvatlas.errors import AtlasError, Code

if TYPE_CHECKING:
    from pathlib import Path

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_BLOB = r"[0-9a-f]{40}|[0-9a-f]{64}"
"""Matches a file name in the hub's cache, which is a digest of the file's content."""
_SMALL = 64 << 20
"""Files of up to this many bytes are hashed completely."""
_SAMPLE = 4096
_APART = 256 << 10
"""Bytes between the starts of two samples in a file without a valid safetensors header."""
_OF_A_TENSOR = 4
"""Number of samples per tensor in a file with a safetensors header."""
_LONGEST_HEADER = 256 << 20


def weights_identity(folder: Path) -> str:
    """Return a digest of a checkpoint's weight files: their names, sizes and sampled bytes.

    A file in the cache of the Hugging Face hub is not sampled, because its name is already a
    digest of its content. An index file alone would not be enough: fine-tunes share the index
    of their base model.

    >>> import tempfile
    >>> from pathlib import Path
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "model.safetensors").write_bytes(bytes(10_000))
    >>> one = weights_identity(folder)
    >>> _ = (folder / "model.safetensors").write_bytes(bytes(9_999) + b"!")
    >>> one == weights_identity(folder), len(one)
    (False, 32)
    """
    files = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS)
    if not files:
        problem = f"The folder contains no weight files ({', '.join(_WEIGHTS)})"
        got = f"{folder}"
        hint = "Pass the checkpoint's folder, or name the weights (vLLM option: weights_identity)"
        raise AtlasError(Code.BAD_CONFIG, problem, got=got, hint=hint)
    from hashlib import blake2b  # slow to import, and only needed here

    digest = blake2b(digest_size=16)
    for path in files:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        blob = path.resolve()
        if blob.parent.name == "blobs" and re.fullmatch(_BLOB, blob.name):
            digest.update(blob.name.encode())
            continue
        for sample in _samples(path):
            digest.update(sample)
    return digest.hexdigest()


def _samples(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file that are hashed: all of a small file, samples of a large one.

    A large file is sampled in every tensor or, without a safetensors header, at regular
    intervals.
    """
    nbytes = path.stat().st_size
    with path.open("rb") as file:
        if nbytes <= _SMALL:
            yield file.read()
            return
        places = range(0, nbytes, _APART)
        for at in _tensor_places(file, nbytes) or places:
            yield os.pread(file.fileno(), _SAMPLE, at)


def _tensor_places(file: BinaryIO, nbytes: int) -> list[int]:
    """Return the offsets to sample in a safetensors file; empty if it has no valid header."""
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
