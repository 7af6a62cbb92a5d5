"""The cache identity of a transformers model, compared by nodes and by tiers."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from kvatlas.errors import AtlasError
from kvatlas.models import CacheIdentity, config_identity

_SUMMED = 1 << 18
"""Number of 8-byte words that are added to one sum."""
_NOT_THE_MODEL = ("transformers_version", "use_cache")
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


def loaded_weights(model: Any) -> str:
    """Return a digest of a model in memory: of its config and all of its tensors.

    >>> layer = torch.nn.Linear(4, 4)
    >>> one = loaded_weights(layer)
    >>> _ = torch.nn.init.ones_(layer.bias)
    >>> one == loaded_weights(layer)
    False
    """
    config = model.config.to_dict() if hasattr(model, "config") else {}
    said = {
        key: value
        for key, value in config.items()
        if key not in _NOT_THE_MODEL and not key.startswith("_")
    }
    digest = blake2b(json.dumps(said, sort_keys=True, default=str).encode(), digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(_summed(tensor.detach()))
    return digest.hexdigest()


def _summed(tensor: torch.Tensor) -> bytes:
    """Return weighted sums of a tensor's 64-bit words, computed on its device.

    The weights are odd, so that a change of any single word changes a sum.
    """
    text = tensor.reshape(-1).contiguous().view(torch.uint8)
    text = text.clone() if text.storage_offset() % 8 else text
    words = text[: text.numel() // 8 * 8].view(torch.int64)
    by = torch.arange(1, 2 * _SUMMED, 2, device=words.device)
    sums = [(part * by[: len(part)]).sum().view(1) for part in torch.split(words, _SUMMED)]
    parts = (torch.cat(sums).view(torch.uint8), text[len(words) * 8 :])
    return b"".join(part.cpu().numpy().tobytes() for part in parts)
