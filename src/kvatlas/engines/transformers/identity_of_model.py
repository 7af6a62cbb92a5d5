"""The cache identity of a transformers model, compared by nodes before they transfer caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvatlas.engines.transformers.tiered_prefixes import loaded_weights
from kvatlas.errors import AtlasError
from kvatlas.models import CacheIdentity, config_identity

_SAMPLED = 64
"""Number of elements of each tensor that are compared with the checkpoint."""


def model_identity(model: Any) -> CacheIdentity:
    """Return the identity of a model's caches.

    If the model was loaded from a local folder, its identity is that of the checkpoint, which
    equals the identity that vLLM computes for it. If the model has an adapter, has weights that
    differ from the files, or has no checkpoint, its identity is a digest of its tensors in memory.
    """
    folder = Path(getattr(model.config, "_name_or_path", "") or "")
    if folder.is_dir() and not getattr(model, "peft_config", None) and _is_loaded(model, folder):
        try:
            return CacheIdentity.of_checkpoint(folder, **_changed(model.config, folder))
        except AtlasError:
            pass  # The folder has no readable weights or config.
    return CacheIdentity(weights=loaded_weights(model))


def _changed(config: Any, folder: Path) -> dict[str, Any]:
    """Return the config values that were changed after the config was loaded from the folder."""
    unchanged = type(config).from_pretrained(folder)
    mine, files = config.to_dict(), unchanged.to_dict()
    if config_identity(mine) == config_identity(files):
        return {}
    return {f"changed {key}": value for key, value in mine.items() if value != files.get(key)}


def _is_loaded(model: Any, folder: Path) -> bool:
    """Return whether a model's tensors equal those in its checkpoint's files, judged by samples.

    Tensors that transformers renames or fuses at load time are not compared.
    """
    from safetensors import SafetensorError, safe_open

    state = model.state_dict()
    compared = 0
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # safe_open is not a mapping
                    held = state.get(name)
                    stored = None if held is None else file.get_tensor(name)
                    if held is None or stored is None or stored.shape != held.shape:
                        continue
                    compared += 1
                    if not _same_samples(stored, held):
                        return False
    except (OSError, SafetensorError):
        return False
    return compared > 0


def _same_samples(stored: torch.Tensor, held: torch.Tensor) -> bool:
    step = max(1, stored.numel() // _SAMPLED)
    one, two = stored.flatten()[::step], held.detach().flatten()[::step]
    return torch.equal(one.to(two.dtype), two.cpu())
