"""Compute the identity of a transformers model's caches, and of the model's rows in a tier."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from kvatlas.errors import AtlasError
from kvatlas.geometry import DType
from kvatlas.models import CacheIdentity, config_identity
from kvatlas.models.row_identity import element_order, row_identity
from kvatlas.planning import Plan
from kvatlas.specs import Recurrent

_SUMMED = 1 << 18
"""Number of 8-byte words that are added to one sum."""
_NOT_THE_MODEL = ("transformers_version", "use_cache")
_SAMPLED = 64
"""Number of elements of each tensor that are compared with the checkpoint."""


def model_identity(model: Any) -> CacheIdentity:
    """Return the identity of a model's caches.

    If the model was loaded from a local folder, return the identity of the checkpoint in this
    folder. vLLM computes an equal identity for this checkpoint, unless vLLM may store the elements
    of K in another order. If the model has an adapter, has weights that differ from the files, or
    has no checkpoint, return a digest of the tensors in memory instead.
    """
    found = _checkpoint_identity(model, whole=False)
    return CacheIdentity(weights=loaded_weights(model)) if found is None else found


def stored_identity(model: Any, plan: Plan) -> CacheIdentity:
    """Return the identity of a model's rows in a tier. `plan` is the plan of its cache.

    Another engine that stores equal rows, such as vLLM, computes an equal identity if three
    conditions hold: the order of the elements in a row is known, all tensors equal the tensors of
    the checkpoint, and nothing is quantised. Otherwise the identity is a digest of the tensors in
    memory.
    """
    order = _element_order(model)
    found = _checkpoint_identity(model, whole=True) if order and _is_plain(plan) else None
    if found is None or order is None:
        return CacheIdentity(weights=loaded_weights(model))
    dtype = DType.of(str(model.dtype).removeprefix("torch.")).name
    return row_identity(found, elements=order, dtype=dtype)


def _element_order(model: Any) -> str | None:
    """Return the name of the order in which a model stores a row's elements; None if unknown."""
    own = type(model).__module__.startswith("transformers.models.")
    return element_order(model.config.to_dict()) if own else None


def _is_plain(plan: Plan) -> bool:
    """Return whether a plan stores K and V without quantisation."""
    specs = [layer.spec for region in plan.regions for layer in region.layers]
    return all(isinstance(one, Recurrent) or getattr(one, "cache", "") == "auto" for one in specs)


def _checkpoint_identity(model: Any, *, whole: bool) -> CacheIdentity | None:
    """Return the identity of a model's checkpoint; None if the model's weights may differ from it.

    If `whole` is true, all tensors of the model are compared with the checkpoint. Otherwise tensors
    that transformers renames or fuses at load time are not compared.
    """
    folder = Path(getattr(model.config, "_name_or_path", "") or "")
    if not folder.is_dir() or getattr(model, "peft_config", None):
        return None
    if not _is_loaded(model, folder, whole=whole):
        return None
    changed = _changed(model.config, folder)
    if _element_order(model) is None:
        changed["elements"] = "transformers"
    try:
        return CacheIdentity.of_checkpoint(folder, **changed)
    except AtlasError:
        return None  # The folder has no readable weights or config.


def _changed(config: Any, folder: Path) -> dict[str, Any]:
    """Return the config values that were changed after the config was loaded from the folder."""
    unchanged = type(config).from_pretrained(folder)
    mine, files = config.to_dict(), unchanged.to_dict()
    if config_identity(mine) == config_identity(files):
        return {}
    return {f"changed {key}": value for key, value in mine.items() if value != files.get(key)}


def _is_loaded(model: Any, folder: Path, *, whole: bool) -> bool:
    """Return whether a model's tensors equal the tensors in the checkpoint's files.

    Each tensor is compared with the tensor of the same name and shape in the files. If `whole` is
    true, all elements are compared, and each tensor must be in the files or share the memory of a
    tensor that is in the files. If `whole` is false, samples are compared, and tensors that are not
    in the files are skipped.
    """
    from safetensors import SafetensorError, safe_open

    state = model.state_dict()
    compared: set[str] = set()
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # safe_open is not a mapping
                    held = state.get(name)
                    stored = None if held is None else file.get_tensor(name)
                    if held is None or stored is None or stored.shape != held.shape:
                        continue
                    compared.add(name)
                    if not _are_equal(stored, held, whole=whole):
                        return False
    except (OSError, SafetensorError):
        return False
    known = {state[name].data_ptr() for name in compared}
    rest = (tensor for name, tensor in state.items() if name not in compared)
    return bool(compared) and (not whole or all(one.data_ptr() in known for one in rest))


def _are_equal(stored: torch.Tensor, held: torch.Tensor, *, whole: bool) -> bool:
    """Return whether two tensors are equal, in all elements or in a sample of them."""
    step = 1 if whole else max(1, stored.numel() // _SAMPLED)
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
    """Return checksums of a tensor: weighted sums of its 64-bit words, computed on its device.

    All factors in the sums are odd numbers, so that a change of any single word changes a sum.
    """
    text = tensor.reshape(-1).contiguous().view(torch.uint8)
    text = text.clone() if text.storage_offset() % 8 else text
    words = text[: text.numel() // 8 * 8].view(torch.int64)
    by = torch.arange(1, 2 * _SUMMED, 2, device=words.device)
    sums = [(part * by[: len(part)]).sum().view(1) for part in torch.split(words, _SUMMED)]
    parts = (torch.cat(sums).view(torch.uint8), text[len(words) * 8 :])
    return b"".join(part.cpu().numpy().tobytes() for part in parts)
