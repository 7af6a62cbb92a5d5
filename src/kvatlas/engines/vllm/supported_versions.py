"""The versions of vLLM that the connector was run with, and what it needs of any."""

from __future__ import annotations

import warnings
from typing import Any

from kvatlas.errors import AtlasError, Code

KNOWN = (0, 32)

CPU_MLA = "vLLM's CPU backend for MLA computes wrong tokens from a cache that was loaded"
"""Why such an engine cannot have a connector."""

METHODS = (
    "bind_connector_metadata",
    "bind_kv_cache_manager",
    "build_connector_meta",
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
"""What vLLM must ask a connector for: without one of these it would silently do less."""


def check_version(version: str, interface: type) -> None:
    """Refuse a vLLM that lacks a method, and warn of one that nobody has run.

    >>> interface = type("KVConnectorBase_V1", (), dict.fromkeys(METHODS))
    >>> check_version("0.32.1", interface)
    >>> check_version("0.9.0", type("KVConnectorBase_V1", (), {}))
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: vLLM's connector interface lacks a method that this connector \
needs. Got vLLM 0.9.0 without KVConnectorBase_V1.bind_connector_metadata. Use vLLM 0.32. \
[engine_refuses]
    """
    missing = [name for name in METHODS if not hasattr(interface, name)]
    if missing:
        raise AtlasError(
            Code.ENGINE_REFUSES,
            "vLLM's connector interface lacks a method that this connector needs",
            got=f"vLLM {version} without {interface.__name__}.{missing[0]}",
            hint=f"Use vLLM {'.'.join(map(str, KNOWN))}",
        )
    if _numbers(version) != KNOWN:
        known = ".".join(map(str, KNOWN))
        warnings.warn(
            f"kvatlas was run with vLLM {known}, and this is {version}: compare its tokens with "
            "those of an engine without a connector before you rely on it",
            stacklevel=3,
        )


def lacking_name(missing: ImportError) -> Exception:
    """The refusal of a vLLM that lacks what the connector imports; else the error as it is.

    >>> gone = ImportError("cannot import name 'SupportsHMA' from 'vllm.base'", name="vllm.base")
    >>> raise lacking_name(gone)
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: vLLM's connector interface lacks a name that this connector \
imports. Got cannot import name 'SupportsHMA' from 'vllm.base'. Use vLLM 0.32. [engine_refuses]
    """
    if not (missing.name or "").startswith("vllm."):
        return missing
    return AtlasError(
        Code.ENGINE_REFUSES,
        "vLLM's connector interface lacks a name that this connector imports",
        got=str(missing),
        hint=f"Use vLLM {'.'.join(map(str, KNOWN))}",
    )


def check_managers(kv_cache_manager: Any) -> None:
    """Refuse a cache manager that does not say which of a request's blocks are cached."""
    managers = getattr(getattr(kv_cache_manager, "coordinator", None), "single_type_managers", ())
    if not managers or not all(hasattr(one, "num_cached_block") for one in managers):
        raise AtlasError(
            Code.ENGINE_REFUSES,
            "vLLM's cache manager does not say which blocks of a request are cached",
            got="managers without num_cached_block",
            hint=f"Use vLLM {'.'.join(map(str, KNOWN))}",
        )


def check_backend(vllm_config: Any) -> None:
    """Refuse MLA on a CPU, where vLLM computes other tokens after a prefix than with it.

    In vLLM 0.32 the CPU's prefill and decode of MLA disagree in the rotary part of Q and K, also
    without a connector: one prompt has other logprobs when its last token is a decode step, which
    it is for every request whose cache was loaded.
    """
    device = getattr(getattr(vllm_config, "device_config", None), "device_type", None)
    if device == "cpu" and getattr(vllm_config.model_config, "use_mla", False):
        raise AtlasError(
            Code.ENGINE_REFUSES,
            CPU_MLA,
            got=f"model {vllm_config.model_config.model!r} with MLA on a CPU",
            hint="Serve it on a GPU, or without a connector",
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
