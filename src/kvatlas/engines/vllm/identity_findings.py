"""Compare the weights and configs of two engines, as far as their arguments allow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvatlas.engines.vllm.engine_pair import Ends, EngineEnd, Finding, finding
from kvatlas.engines.vllm.supported_versions import CPU_MLA
from kvatlas.engines.vllm.weights_identity import stored_config
from kvatlas.errors import AtlasError
from kvatlas.models import config_identity, weights_identity
from kvatlas.specs import LatentAttention

_SHOWN = 8
"""Number of characters of a digest that are shown."""


@dataclass(frozen=True)
class _Served:
    """The weights and config of an engine, as far as its arguments and local files show them."""

    weights: str | None
    """The name or a digest of the weights; None if they are not on this host."""
    config: str | None
    changes: str
    """A digest of the arguments that change the config."""
    shown: str


def weights_finding(ends: Ends) -> Finding | None:
    """Return a finding that compares the engines' weights; None if an engine has no arguments."""
    if any(end.arguments is None for end in ends):
        return None
    unnamed = [end for end in ends if _makes_up_weights(end)]
    if unnamed:
        why = "load_format dummy needs weights_identity in kv_connector_extra_config"
        return finding("weights", ("made up" if end in unnamed else "-" for end in ends), "no", why)
    one, other = (_served(end) for end in ends)
    shown = (one.shown, other.shown)
    why = _difference(one, other)
    if why and all(end.settings and not end.settings.check_identity for end in ends):
        return finding(
            "weights", shown, "look", f"{why}; both accept that (check_identity is false)"
        )
    if why:
        return finding("weights", shown, "no", why)
    if one.weights is None or other.weights is None:
        if one.shown == other.shown:
            return finding("weights", shown, why="the same name; the files are not on this host")
        why = "cannot be compared on this host; the engines reject each other if they differ"
        return finding("weights", shown, "look", why)
    return finding("weights", shown, why="the same")


def latent_on_cpu_finding(ends: Ends) -> Finding | None:
    """Return a finding if an engine uses MLA on a CPU, which is not supported; else None."""
    wrong = [is_on_cpu(end) and keeps_latents(end) for end in ends]
    if not any(wrong):
        return None
    return finding("MLA", ("on a CPU" if one else "-" for one in wrong), "no", CPU_MLA)


def _difference(one: _Served, other: _Served) -> str:
    """Describe how weights or configs differ; empty if no difference is known."""
    if one.weights and other.weights and one.weights != other.weights:
        return "the weights differ"
    if one.config and other.config:
        return "" if one.config == other.config else "the configs differ"
    return "" if one.changes == other.changes else "hf_overrides or quantization differ"


def _served(end: EngineEnd) -> _Served:
    assert end.arguments is not None  # noqa: S101
    given = end.arguments
    named = end.settings.weights_identity if end.settings else None
    changes = {"hf_overrides": given.hf_overrides, "quantization": given.quantization}
    folder = Path(given.model)
    weights, config = named, None
    if folder.is_dir():
        weights = weights if weights is not None else _weights(folder)
        config = _config(folder, given.hf_overrides or {}, given.quantization)
    shown = given.model if weights is None else weights
    if named is None and weights is not None:
        shown = weights[:_SHOWN]
    return _Served(weights, config, config_identity(changes), shown)


def _weights(folder: Path) -> str | None:
    try:
        return weights_identity(folder)
    except AtlasError:
        return None


def _config(folder: Path, overrides: Mapping[str, Any], quantization: str | None) -> str | None:
    config = stored_config(folder)
    if config is None:
        return None
    own = config.get("quantization_config") or {}
    used = quantization or (own.get("quant_method") if isinstance(own, dict) else None)
    return config_identity(_merged(config, overrides), quantization=used)


def _merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with `hf_overrides` applied, recursively as in vLLM."""
    merged = dict(config)
    for key, value in overrides.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = _merged(old, value)
        merged[key] = value
    return merged


def _makes_up_weights(end: EngineEnd) -> bool:
    """Return whether an engine runs with dummy weights that its settings do not identify."""
    if end.arguments is None or end.settings is None:
        return False
    unnamed = end.settings.weights_identity is None and end.settings.check_identity
    return unnamed and end.arguments.load_format == "dummy"


def is_on_cpu(end: EngineEnd) -> bool:
    """Return whether an engine's arguments show that it computes on a CPU."""
    given = end.arguments
    if given is None:
        return False
    return given.device == "cpu" or (given.attention_backend or "").startswith("CPU_")


def keeps_latents(end: EngineEnd) -> bool:
    """Return whether an engine's model uses latent attention (MLA)."""
    if end.plan is None:
        return (end.arguments and end.arguments.attention_backend) == "CPU_MLA"
    names = (layer.name for region in end.plan.regions for layer in region.layers)
    return any(isinstance(end.plan.spec(name), LatentAttention) for name in names)
