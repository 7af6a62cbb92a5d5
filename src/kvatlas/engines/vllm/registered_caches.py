"""What a worker learns from vLLM when its caches are registered, beside the tensors."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from vllm.distributed.parallel_state import get_pp_group

from kvatlas.engines.vllm.layer_specs import seen_by_group
from kvatlas.errors import AtlasError, Code
from kvatlas.specs import Visibility

T = TypeVar("T")


def check_reachable(tensor: torch.Tensor) -> None:
    """Refuse a tier for caches that it cannot read and write."""
    if tensor.device.type not in ("cpu", "cuda"):
        raise AtlasError(
            Code.WRONG_DEVICE,
            "A tier reads and writes caches in host memory, or in that of a CUDA device",
            got=f"tensors on {tensor.device}",
            hint="Leave tier out of kv_connector_extra_config",
        )


def layer_backends(vllm_config: Any, layers: Any) -> dict[str, str]:
    """The attention backend of each layer, as its module says."""
    modules = vllm_config.compilation_config.static_forward_context
    found = {}
    for name in layers:
        backend = getattr(modules.get(name), "get_attn_backend", lambda: None)()
        if backend is not None:
            found[name] = backend.get_name()
    return found


def seen_by_layers(vllm_config: Any, layers: Any) -> dict[str, Visibility]:
    """What each layer sees, as its module says."""
    modules = vllm_config.compilation_config.static_forward_context
    return {
        name: seen_by_group(modules[name])
        for name in layers
        if hasattr(modules.get(name), "sliding_window")
    }


def from_all_stages(own: T) -> list[T]:
    """What every pipeline stage knows, in their order: each tells the others."""
    group = get_pp_group()
    if group.world_size == 1:
        return [own]
    told: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(told, own, group=group.cpu_group)
    return told
