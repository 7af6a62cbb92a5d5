"""Identities of an engine's weights and config. Caches of different identities must not be mixed.

Nodes compare `engine_identity` when they connect. Names of rows in a store contain
`stored_identity`. Keys of a tier in memory or in a file start from `cache_identity`. All of them
identify the weights with the same digest, which is computed once per process.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvatlas.engines.vllm.settings import ConnectorSettings
from kvatlas.errors import AtlasError, Code
from kvatlas.models import CacheIdentity, config_identity, weights_identity
from kvatlas.models.row_identity import element_order, row_identity

_NOT_THE_MODEL = ("_name_or_path", "transformers_version")
_WITHOUT_FILES = ("dummy",)
"""Load formats that generate weights instead of reading them."""
_LOADED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", "config.json")
"""Endings of the names of files that determine K and V."""
_ONE_ENGINE = ("EngineCore", "VllmWorker")
"""Name prefixes of vLLM processes that load the weights of exactly one engine."""

Signature = tuple[tuple[str, int, int, int], ...]
"""(Name, size, inode, change time) of each file in a folder."""


def engine_identity(
    vllm_config: Any, settings: ConnectorSettings, untouched: Mapping[str, Any] | None
) -> CacheIdentity | None:
    """Return the identity of an engine's weights and of the config that determines K and V.

    `untouched` is the model's config without the engine's arguments. The identity includes the
    config values that the arguments changed, but no paths, names or compute dtype. Return None if
    the weights are unknown and the settings accept any identity.
    """
    served = vllm_config.model_config
    try:
        weights = _served_weights(vllm_config, settings.weights_identity)
    except AtlasError:
        if settings.check_identity:
            raise
        return None
    effective = served.hf_config.to_dict()
    about: dict[str, Any] = {
        "quantization": getattr(served, "quantization", None),
        "uses_long_rope": _uses_long_rope(served) or None,
        # Classes of transformers may store the elements of K in another order than vLLM's classes.
        "transformers_backend": _uses_transformers_backend(served) or None,
    }
    folder = _find_folder(vllm_config)
    stored = None if folder is None else stored_config(folder)
    if stored is None or untouched is None:
        return CacheIdentity(weights=weights, config=config_identity(effective, engine=about))
    about["changed"] = _changed(untouched, effective)
    return CacheIdentity(weights=weights, config=config_identity(stored, engine=about))


def stored_identity(
    vllm_config: Any, settings: ConnectorSettings, untouched: Mapping[str, Any] | None, dtype: str
) -> CacheIdentity:
    """Return the identity of an engine's rows in a store.

    Other engines, including engines other than vLLM, compute an equal identity if they store equal
    rows. `dtype` is the compute dtype. `engine_identity` describes the other arguments.
    """
    known = ConnectorSettings(weights_identity=settings.weights_identity)
    identity = engine_identity(vllm_config, known, untouched)
    assert identity is not None  # noqa: S101  # unknown weights raise
    served = vllm_config.model_config
    other_class = _uses_transformers_backend(served) or getattr(
        served, "model_class_overrides", None
    )
    elements = None if other_class else element_order(served.hf_config.to_dict())
    return row_identity(identity, elements=elements or "vllm", dtype=dtype)


def cache_identity(
    vllm_config: Any, given: str | None, dtype: str | None = None, cache: str | None = None
) -> bytes:
    """Return a digest of the weights, config and dtypes that stored prefixes depend on.

    `given` is a name for the weights; by default the digest covers the checkpoint's files. `dtype`
    is the compute dtype, by default the engine's. `cache` is the cache dtype, for a tier that does
    not store blocks of different dtypes separately.
    """
    served = vllm_config.model_config
    config = {
        key: value for key, value in served.hf_config.to_dict().items() if key not in _NOT_THE_MODEL
    }
    about = {
        "weights": _served_weights(vllm_config, given),
        "config": config,
        "dtype": dtype or str(served.dtype),
        "quantization": getattr(served, "quantization", None),
        "cache": cache,
    }
    said = json.dumps(about, sort_keys=True, default=str)
    return blake2b(said.encode(), digest_size=32).digest()


def folder_identity(folder: Path) -> str:
    """Return a digest of the weights in a folder; compute it again only if a file has changed."""
    return _digest(folder, _signature(folder))


def _served_weights(vllm_config: Any, given: str | None) -> str:
    """Return `given` unless it is None; otherwise return a digest of the checkpoint's files."""
    if given is not None:
        return given
    load = getattr(vllm_config, "load_config", None)
    load_format = str(getattr(load, "load_format", "auto"))
    if load_format in _WITHOUT_FILES:
        raise _unknown_weights(f"load_format {load_format!r}, which reads no weights")
    folder = _find_folder(vllm_config)
    if folder is None:
        model = vllm_config.model_config.model
        raise _unknown_weights(f"model {model!r}, which is not a folder on this host")
    _check_unchanged(folder)
    return folder_identity(folder)


def _find_folder(vllm_config: Any) -> Path | None:
    """Return the folder of a checkpoint, local or in the hub's cache; None if absent."""
    served = vllm_config.model_config
    if Path(served.model).is_dir():
        return Path(served.model)
    if Path(served.model).is_file():
        return Path(served.model).parent
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    load = getattr(vllm_config, "load_config", None)
    for cache in dict.fromkeys((getattr(load, "download_dir", None), None)):
        try:
            found = snapshot_download(
                served.model,
                revision=getattr(served, "revision", None),
                cache_dir=cache,
                local_files_only=True,
            )
        except (LocalEntryNotFoundError, HFValidationError):
            continue
        return Path(found)
    return None


def _signature(folder: Path) -> Signature:
    found = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    return tuple((name, at.st_size, at.st_ino, at.st_ctime_ns) for name, at in found)


@lru_cache(maxsize=64)
def _digest(folder: Path, _: Signature) -> str:
    return weights_identity(folder)


def _check_unchanged(folder: Path) -> None:
    """Raise if a checkpoint was replaced while this process was loading it.

    vLLM makes connectors after it has loaded the weights. If a file changed after the process
    started, vLLM may have loaded other bytes. A process that serves several engines in turn is not
    checked. Files of the hub's cache never change.
    """
    if not multiprocessing.current_process().name.startswith(_ONE_ENGINE):
        return
    started = _process_start()
    changed = [
        path.name
        for path in sorted(folder.iterdir())
        if path.name.endswith(_LOADED)
        and path.resolve().parent.name != "blobs"
        and path.stat().st_ctime > started
    ]
    if changed:
        raise AtlasError(
            Code.BAD_CONFIG,
            "The checkpoint changed while the engine was starting, so its weights are unknown",
            got=f"{changed[0]!r}, changed after the process started",
            hint="Start the engine again, or set weights_identity in kv_connector_extra_config",
        )


def _process_start() -> float:
    """Return when this process started, in seconds since the epoch."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def stored_config(folder: Path) -> dict[str, Any] | None:
    """Return a checkpoint's `config.json`; None if it is missing or cannot be read."""
    try:
        found = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _changed(untouched: Mapping[str, Any], effective: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config values that an engine's arguments changed; removed values are "null"."""
    rope = "rope_parameters"
    effective = {**effective, rope: _as_read(untouched.get(rope), effective.get(rope))}
    return {
        key: "null" if effective.get(key) is None else effective[key]
        for key in sorted({*untouched, *effective})
        if untouched.get(key) != effective.get(key)
    }


def _as_read(untouched: Any, effective: Any) -> Any:
    """Return RoPE parameters with the type that was in the config before vLLM loaded the model.

    Models with MLA rename the type in the processes that load them, but not in the scheduler's
    process.
    """
    if not (isinstance(untouched, Mapping) and isinstance(effective, Mapping)):
        return effective
    if not str(effective.get("rope_type")).startswith("deepseek_"):
        return effective
    return {**effective, "rope_type": untouched.get("rope_type")}


def _uses_long_rope(served: Any) -> bool:
    """Return whether vLLM uses the long factors of LongRoPE.

    vLLM uses them if `max_model_len` exceeds the context length of the original model.
    """
    text = getattr(served, "hf_text_config", None)
    rope = getattr(text, "rope_parameters", None)
    nested = list(rope.values()) if isinstance(rope, Mapping) else []
    for one in (rope, *nested):
        if isinstance(one, Mapping) and one.get("rope_type") == "longrope":
            short = one.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None
            )
            return short is not None and served.max_model_len > short
    return False


def _uses_transformers_backend(served: Any) -> bool:
    """Return whether vLLM runs the model with transformers' class instead of its own."""
    return bool(getattr(served, "using_transformers_backend", lambda: False)())


def _unknown_weights(got: str) -> AtlasError:
    return AtlasError(
        Code.BAD_CONFIG,
        "The engine's weights cannot be identified, and caches of different weights must not mix",
        got=got,
        hint="Set weights_identity in kv_connector_extra_config to a unique name for the weights",
    )
