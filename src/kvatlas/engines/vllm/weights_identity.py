"""Which model and weights a cache was computed with: what is kept under one is no other's."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from kvatlas.errors import AtlasError, Code

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SMALL = 64 << 20
"""Files up to here are read whole."""
_SAMPLE = 4096
_APART = 256 << 10
"""Bytes from one sample of a file to the next, where nothing is known of its tensors."""
_OF_A_TENSOR = 4
"""Samples of each tensor, where a file says where they are."""
_LONGEST_HEADER = 256 << 20
_NOT_THE_MODEL = ("_name_or_path", "transformers_version")


def cache_identity(vllm_config: Any, given: str | None) -> bytes:
    """What caches of an engine depend on: weights, the config they are used with, dtypes.

    The weights are those that `given` names, else what the checkpoint's files say.
    """
    served = vllm_config.model_config
    config = {
        key: value for key, value in served.hf_config.to_dict().items() if key not in _NOT_THE_MODEL
    }
    about = {
        "weights": given if given is not None else weights_identity(_folder(served)),
        "config": config,
        "dtype": str(served.dtype),
        "quantization": getattr(served, "quantization", None),
        "cache": str(vllm_config.cache_config.cache_dtype),
    }
    said = json.dumps(about, sort_keys=True, default=str)
    return blake2b(said.encode(), digest_size=32).digest()


def weights_identity(folder: Path) -> str:
    """A digest of a checkpoint's files: their names, sizes, and bytes sampled from every tensor.

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
        raise _unknown_weights(f"no file of weights in {folder}")
    digest = blake2b(digest_size=16)
    for path in files:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
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


def _folder(served: Any) -> Path:
    """Where a model's checkpoint is: a folder, or what the hub's cache has of its name."""
    if Path(served.model).is_dir():
        return Path(served.model)
    from huggingface_hub import try_to_load_from_cache

    revision = getattr(served, "revision", None)
    found = try_to_load_from_cache(served.model, "config.json", revision=revision)
    if not isinstance(found, str):
        raise _unknown_weights(f"model {served.model!r}, which is no folder here")
    return Path(found).parent


def _unknown_weights(got: str) -> AtlasError:
    return AtlasError(
        Code.BAD_CONFIG,
        "It cannot be told which weights an engine serves, and a tier must not mix them",
        got=got,
        hint="Name them in kv_connector_extra_config: weights_identity",
    )
