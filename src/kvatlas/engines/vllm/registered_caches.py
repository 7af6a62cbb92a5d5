"""Information that a worker collects from vLLM when it registers its caches."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.transformers_utils.config import get_config

from kvatlas.copying.memory_copy import device_of
from kvatlas.engines.vllm.layer_specs import seen_by_group
from kvatlas.engines.vllm.settings import ConnectorSettings
from kvatlas.errors import AtlasError, Code
from kvatlas.specs import Visibility

T = TypeVar("T")

log = logging.getLogger("kvatlas.vllm")


def check_reachable(tensor: torch.Tensor) -> None:
    """Raise if a tier cannot read and write the memory of a cache tensor."""
    if tensor.device.type not in ("cpu", "cuda"):
        raise AtlasError(
            Code.WRONG_DEVICE,
            "A tier requires caches in host memory or on a CUDA device",
            got=f"tensors on {tensor.device}",
            hint="Serve the model on a CPU or CUDA device, or remove tier from "
            "kv_connector_extra_config",
        )


def untouched_config(served: Any) -> dict[str, Any] | None:
    """Read a model's config from its source, without the values that the engine's arguments set.

    Return None if the source cannot be read.
    """
    try:
        found = get_config(
            served.hf_config_path or served.model,
            served.trust_remote_code,
            served.revision,
            served.code_revision,
            served.config_format,
        )
    except Exception as problem:  # a config's remote code may raise anything
        log.warning("cannot read the model's config again: %s", problem)
        return None
    read: dict[str, Any] = found.to_dict()
    return read


def layer_backends(vllm_config: Any, layers: Any) -> dict[str, str]:
    """Return the name of each layer's attention backend, from the layer's module."""
    modules = vllm_config.compilation_config.static_forward_context
    found = {}
    for name in layers:
        backend = getattr(modules.get(name), "get_attn_backend", lambda: None)()
        if backend is not None:
            found[name] = backend.get_name()
    return found


def seen_by_layers(vllm_config: Any, layers: Any) -> dict[str, Visibility]:
    """Return each layer's window or chunk, from the layer's module."""
    modules = vllm_config.compilation_config.static_forward_context
    return {
        name: seen_by_group(modules[name])
        for name in layers
        if hasattr(modules.get(name), "sliding_window")
    }


def kernel_blocks(kv_cache_config: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the tokens per kernel block, by layer.

    Kernel blocks are smaller than blocks if vLLM splits blocks for its kernels.
    """
    blocks = {}
    for group in kv_cache_config.transfer_groups:
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in group.layer_names:
            spec = specs[name] if specs else group.kv_cache_spec
            if name in tensors:
                split = max(1, tensors[name].shape[0] // kv_cache_config.num_blocks)
                blocks[name] = spec.block_size // split
    return blocks


def device_for(settings: ConnectorSettings, tensor: torch.Tensor) -> str:
    """Return a tensor's device name; raise if the transport is not configured for GPU memory."""
    asked = settings.transport_options.get("kind") == "VRAM" or settings.transport == "cuda"
    if tensor.device.type == "cpu" or asked or settings.alone:
        return device_of(tensor)
    raise AtlasError(
        Code.WRONG_DEVICE,
        "The transport is not configured for caches in GPU memory",
        got=f"transport {settings.transport!r} and tensors on {tensor.device}",
        hint='Set transport to "cuda", or to "nixl" with transport_options {"kind": "VRAM"}',
    )


def from_all_stages(own: T) -> list[T]:
    """Gather a value from every pipeline stage, in stage order."""
    group = get_pp_group()
    if group.world_size == 1:
        return [own]
    told: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(told, own, group=group.cpu_group)
    return told
