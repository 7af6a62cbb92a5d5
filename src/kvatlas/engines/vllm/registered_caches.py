"""Information that a worker collects from vLLM when it registers its caches."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.transformers_utils.config import get_config

from kvatlas.engines.vllm.layer_specs import seen_by_group
from kvatlas.errors import AtlasError, Code
from kvatlas.specs import Visibility

T = TypeVar("T")

log = logging.getLogger("kvatlas.vllm")


def check_reachable(tensor: torch.Tensor) -> None:
    """Raise if a tier cannot read and write the caches' memory."""
    if tensor.device.type not in ("cpu", "cuda"):
        raise AtlasError(
            Code.WRONG_DEVICE,
            "A tier requires caches in host memory or on a CUDA device",
            got=f"tensors on {tensor.device}",
            hint="Remove tier from kv_connector_extra_config",
        )


def untouched_config(served: Any) -> dict[str, Any] | None:
    """Return a model's config without the changes by the engine's arguments.

    Return None if it cannot be read again.
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
    """Return the attention backend of each layer, from its module."""
    modules = vllm_config.compilation_config.static_forward_context
    found = {}
    for name in layers:
        backend = getattr(modules.get(name), "get_attn_backend", lambda: None)()
        if backend is not None:
            found[name] = backend.get_name()
    return found


def seen_by_layers(vllm_config: Any, layers: Any) -> dict[str, Visibility]:
    """Return the visibility of each layer, from its module."""
    modules = vllm_config.compilation_config.static_forward_context
    return {
        name: seen_by_group(modules[name])
        for name in layers
        if hasattr(modules.get(name), "sliding_window")
    }


def from_all_stages(own: T) -> list[T]:
    """Gather a value from every pipeline stage, in stage order."""
    group = get_pp_group()
    if group.world_size == 1:
        return [own]
    told: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(told, own, group=group.cpu_group)
    return told
