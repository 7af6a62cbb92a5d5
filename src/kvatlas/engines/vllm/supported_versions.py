"""Check that vLLM's version and interface support the connector."""

from __future__ import annotations

import warnings
from typing import Any

from kvatlas.errors import AtlasError, Code

KNOWN = ("0.32", "0.33")
"""Releases of vLLM that are tested."""

_USE = f"Use vLLM {' or '.join(KNOWN)}"

CPU_MLA = "vLLM's CPU backend for MLA computes wrong tokens from a loaded cache"
"""The reason why an engine with MLA on a CPU cannot use a connector."""

METHODS = (
    "bind_connector_metadata",
    "bind_kv_cache_manager",
    "build_connector_meta",
    "build_connector_worker_meta",
    "get_handshake_metadata",
    "get_kv_connector_stats",
    "get_loaded_kv_cache_group_ids",
    "get_num_new_matched_tokens",
    "get_transfer_results",
    "on_new_request",
    "register_kv_caches",
    "set_xfer_handshake_metadata_pp_aware",
    "shutdown",
    "start_load_kv",
    "update_connector_output",
    "update_state_after_alloc",
)
"""Methods that vLLM must call. Without one of them, the connector would silently do less."""


def check_version(version: str, interface: type) -> None:
    """Raise if vLLM's interface lacks a method; warn if the version is untested.

    >>> interface = type("KVConnectorBase_V1", (), dict.fromkeys(METHODS))
    >>> check_version("0.32.1", interface)
    >>> check_version("0.9.0", type("KVConnectorBase_V1", (), {}))
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: vLLM's connector interface lacks a method that this connector \
needs. Got vLLM 0.9.0 without KVConnectorBase_V1.bind_connector_metadata. Use vLLM 0.32 \
or 0.33. [engine_refuses]
    """
    missing = [name for name in METHODS if not hasattr(interface, name)]
    if missing:
        raise AtlasError(
            Code.ENGINE_REFUSES,
            "vLLM's connector interface lacks a method that this connector needs",
            got=f"vLLM {version} without {interface.__name__}.{missing[0]}",
            hint=_USE,
        )
    if ".".join(version.split(".")[:2]) not in KNOWN:
        known = " and ".join(KNOWN)
        warnings.warn(
            f"kvatlas is tested with vLLM {known}; this is vLLM {version}. Compare its output with "
            "that of an engine without a connector before you rely on it",
            stacklevel=3,
        )


def lacking_name(missing: ImportError) -> Exception:
    """Return the error to raise for a failed import.

    The result is an `AtlasError` if a module of vLLM lacks the imported name. Otherwise it is
    `missing` itself.

    >>> gone = ImportError("cannot import name 'SupportsHMA' from 'vllm.base'", name="vllm.base")
    >>> raise lacking_name(gone)
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: vLLM's connector interface lacks a name that this connector \
imports. Got cannot import name 'SupportsHMA' from 'vllm.base'. Use vLLM 0.32 or 0.33. \
[engine_refuses]
    """
    if not (missing.name or "").startswith("vllm."):
        return missing
    return AtlasError(
        Code.ENGINE_REFUSES,
        "vLLM's connector interface lacks a name that this connector imports",
        got=str(missing),
        hint=_USE,
    )


def check_managers(kv_cache_manager: Any) -> None:
    """Raise an error if vLLM's cache manager lacks the attributes with each request's blocks."""
    managers = getattr(getattr(kv_cache_manager, "coordinator", None), "single_type_managers", ())
    needed = ("num_cached_block", "req_to_blocks", "block_pool")
    lacking = [name for name in needed if not all(hasattr(one, name) for one in managers)]
    if not managers or lacking:
        raise AtlasError(
            Code.ENGINE_REFUSES,
            "vLLM's cache manager lacks an attribute that this connector reads",
            got=f"single_type_managers without {(lacking or needed)[0]}",
            hint=_USE,
        )


def check_backend(vllm_config: Any) -> None:
    """Raise for MLA on a CPU, where vLLM computes wrong tokens after a loaded prefix.

    In vLLM 0.32, prefill and decode of MLA on a CPU disagree in the rotary part of Q and K, even
    without a connector. The logprobs of a prompt change if its last token is computed in a decode
    step. After a cache was loaded, the last token is always computed in a decode step.
    """
    device = getattr(getattr(vllm_config, "device_config", None), "device_type", None)
    if device == "cpu" and getattr(vllm_config.model_config, "use_mla", False):
        raise AtlasError(
            Code.ENGINE_REFUSES,
            CPU_MLA,
            got=f"model {vllm_config.model_config.model!r} with MLA on a CPU",
            hint="Serve the model on a GPU, or without a connector",
        )
