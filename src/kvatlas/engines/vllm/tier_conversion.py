"""Convert blocks of a tier that were stored by engines with another cache dtype.

The setting `convert` names both formats. This engine's scales come from its layers. Stored blocks
do not contain their scales, so the setting `convert_scales` specifies them.
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
    """Return how to convert the tier's blocks to this engine's dtype; None without `convert`."""
    if settings.convert is None:
        return None
    return Converting(
        settings.convert, source_scales=settings.convert_scales, destination_scales=own_scales
    )


def searching(settings: ConnectorSettings) -> Converting | None:
    """Return the conversion for lookups, which need no scales; None without `convert`."""
    if settings.convert is None:
        return None
    return Converting(settings.convert, source_scales=1.0, destination_scales=1.0)


def layer_scales(vllm_config: Any, stage: DescribedStage) -> dict[str, tuple[float, float]]:
    """Return the K and V scales of quantised layers, as vLLM read them from the checkpoint."""
    modules = vllm_config.compilation_config.static_forward_context
    found = {}
    for name in (one.layer.name for one in stage.layers if needs_scales(one.layer.spec)):
        module = modules.get(name)
        if hasattr(module, "_k_scale_float"):
            _refuse_scales_by_head(name, module)
            found[name] = float(module._k_scale_float), float(module._v_scale_float)
    return found


def _refuse_scales_by_head(layer: str, module: Any) -> None:
    """Raise if a layer has one scale per head: vLLM reports only the largest of them."""
    scales = [getattr(module, name, None) for name in ("_k_scale", "_v_scale")]
    if any(scale is not None and scale.numel() > 1 for scale in scales):
        problem = "Conversion does not support layers with one scale per head"
        hint = "Remove convert from kv_connector_extra_config"
        raise AtlasError(Code.CANNOT_CONVERT, problem, got=f"layer {layer:.200}", hint=hint)


def prefix_identity(settings: ConnectorSettings, vllm_config: Any) -> bytes:
    """Return the identity from which the tier computes the keys of prefixes.

    If the tier is in a file or in memory, the identity includes the cache dtype, so that engines
    with another cache dtype find no blocks that they cannot read. In a store, the names of objects
    contain the cache dtype instead.
    """
    dtype = stored_dtype(settings, vllm_config.model_config)
    cache = None if settings.fleet_tier else stored_cache(settings, vllm_config)
    return cache_identity(vllm_config, settings.weights_identity, dtype, cache)


def stored_cache(settings: ConnectorSettings, vllm_config: Any) -> str:
    """Return the cache dtype of the tier's blocks, as kvatlas names it.

    Formats that kvatlas does not convert keep vLLM's name.
    """
    said = str(vllm_config.cache_config.cache_dtype)
    if settings.convert is not None:
        ((said, _),) = parse_conversion(settings.convert)
    elif said == "auto":
        said = dtype_name(vllm_config.model_config.dtype)
    if said == "fp8_ds_mla":  # the workers' name for fp8 of sparse MLA; the scheduler may use fp8
        return "fp8"
    try:
        return format_name(said)
    except AtlasError:  # a format of vLLM without conversions
        return said


def stored_dtype(settings: ConnectorSettings, served: Any) -> str:
    """Return the dtype in which the engines that store blocks in the tier compute.

    The result is torch's name of the dtype. A quantised source format of `convert` does not
    determine this dtype. The result is then the dtype in which this engine computes.
    """
    if settings.convert is not None:
        sources = {source for source, _ in parse_conversion(settings.convert)}
        if len(sources) == 1 and sources <= set(PLAIN_FORMATS):
            return _TORCH[sources.pop()]
    return str(served.dtype)


def keeps_finished(settings: ConnectorSettings, served: Any) -> bool:
    """Return whether an engine stores its finished requests in the tier.

    With `convert`, the tier's blocks have another format than this engine's, and blocks are
    converted only when they are loaded. An engine with this setting stores its requests only in a
    store that several engines share, and only if all these engines have the same compute dtype.
    """
    if settings.convert is None:
        return True
    return settings.fleet_tier and stored_dtype(settings, served) == str(served.dtype)
