"""What blocks of a tier are converted from, where engines of another cache dtype stored them.

The setting `convert` names both formats. This engine's own scales are those that its layers
quantise with; those of the engines that stored are in no block, and the settings name them.
"""

from __future__ import annotations

from typing import Any

from kvatlas.engines.vllm.describe import DescribedStage
from kvatlas.engines.vllm.layer_specs import dtype_name
from kvatlas.engines.vllm.settings import ConnectorSettings
from kvatlas.engines.vllm.weights_identity import cache_identity
from kvatlas.errors import AtlasError, Code
from kvatlas.routing import Scales
from kvatlas.routing.conversion import parse_conversion
from kvatlas.specs.cell_formats import PLAIN_FORMATS, format_name, needs_scales
from kvatlas.tier import Converting

_TORCH = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}


def tier_converting(settings: ConnectorSettings, own_scales: Scales) -> Converting | None:
    """How a tier's blocks become this engine's; None where the settings convert nothing."""
    if settings.convert is None:
        return None
    return Converting(settings.convert, src_scales=settings.convert_scales, dst_scales=own_scales)


def searching(settings: ConnectorSettings) -> Converting | None:
    """The same for who looks for blocks and fetches none: scales are then of no matter."""
    if settings.convert is None:
        return None
    return Converting(settings.convert, src_scales=1.0, dst_scales=1.0)


def layer_scales(vllm_config: Any, stage: DescribedStage) -> dict[str, tuple[float, float]]:
    """What layers quantise K and V with, where they do, as vLLM has read it from the checkpoint."""
    modules = vllm_config.compilation_config.static_forward_context
    found = {}
    for name in (one.layer.name for one in stage.layers if needs_scales(one.layer.spec)):
        module = modules.get(name)
        if hasattr(module, "_k_scale_float"):
            _refuse_scales_by_head(name, module)
            found[name] = float(module._k_scale_float), float(module._v_scale_float)
    return found


def _refuse_scales_by_head(layer: str, module: Any) -> None:
    """Refuse scales of single heads, of which vLLM's own number is the largest alone."""
    scales = [getattr(module, name, None) for name in ("_k_scale", "_v_scale")]
    if any(scale is not None and scale.numel() > 1 for scale in scales):
        problem = "A layer is quantised head by head, and only whole tensors are converted"
        hint = "Leave convert out of kv_connector_extra_config"
        raise AtlasError(Code.CANNOT_CONVERT, problem, got=f"{layer:.200}", hint=hint)


def prefix_identity(settings: ConnectorSettings, vllm_config: Any) -> bytes:
    """What prefixes that are looked for depend on.

    A store keeps rows of unlike cache dtypes apart by their names. A file that workers cannot
    read may still be served by others, so there the scheduler's keys say which dtype is meant.
    """
    dtype = stored_dtype(settings, vllm_config.model_config)
    cache = None if settings.fleet_tier else stored_cache(settings, vllm_config)
    return cache_identity(vllm_config, settings.weights_identity, dtype, cache)


def stored_cache(settings: ConnectorSettings, vllm_config: Any) -> str:
    """The cache dtype of blocks that are looked for, by one name for all engines."""
    said = str(vllm_config.cache_config.cache_dtype)
    if settings.convert is not None:
        ((said, _),) = parse_conversion(settings.convert)
    elif said == "auto":
        said = dtype_name(vllm_config.model_config.dtype)
    if said == "fp8_ds_mla":  # what workers call fp8 of sparse latents, and schedulers may not
        return "fp8"
    try:
        return format_name(said)
    except AtlasError:  # vLLM has formats that nothing converts
        return said


def stored_dtype(settings: ConnectorSettings, served: Any) -> str:
    """The dtype that engines compute in whose blocks are looked for, as torch calls it.

    What they quantise says nothing of it: they are then taken to compute as this one does.
    """
    if settings.convert is not None:
        sources = {source for source, _ in parse_conversion(settings.convert)}
        if len(sources) == 1 and sources <= set(PLAIN_FORMATS):
            return _TORCH[sources.pop()]
    return str(served.dtype)


def keeps_finished(settings: ConnectorSettings, served: Any) -> bool:
    """Whether an engine stores too: not into a file, nor beside what was computed otherwise.

    A file has blocks of one dtype, and nothing is converted as it is stored.
    """
    if settings.convert is None:
        return True
    return settings.fleet_tier and stored_dtype(settings, served) == str(served.dtype)
