"""Which model and weights a cache was computed with: what is kept under one is no other's."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.models import weights_identity

_NOT_THE_MODEL = ("_name_or_path", "transformers_version")


def cache_identity(
    vllm_config: Any, given: str | None, dtype: str | None = None, cache: str | None = None
) -> bytes:
    """What caches of an engine depend on: weights, the config they are used with, its dtype.

    The weights are those that `given` names, else what the checkpoint's files say. `dtype` is
    what was computed in, else the engine's own. `cache` is the cache dtype, where a tier does
    not keep blocks of one apart from those of another.
    """
    served = vllm_config.model_config
    config = {
        key: value for key, value in served.hf_config.to_dict().items() if key not in _NOT_THE_MODEL
    }
    about = {
        "weights": given if given is not None else weights_identity(_folder(served)),
        "config": config,
        "dtype": dtype or str(served.dtype),
        "quantization": getattr(served, "quantization", None),
        "cache": cache,
    }
    said = json.dumps(about, sort_keys=True, default=str)
    return blake2b(said.encode(), digest_size=32).digest()


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
