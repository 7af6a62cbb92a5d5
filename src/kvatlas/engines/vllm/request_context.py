"""Digest a request's context: the adapter, salt, media and embeddings.

K and V depend on the context and on the tokens. Two requests with equal tokens and different
contexts never read each other's caches.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from kvatlas.engines.vllm.weights_identity import folder_identity
from kvatlas.errors import AtlasError
from kvatlas.models import config_identity

_NAMES = {"base_model_name_or_path": None, "revision": None, "inference_mode": None}
"""Values of an adapter's config that do not change K and V."""


def request_context(request: Any, tokens: int) -> bytes:
    """Return a digest of the context in which a request's first `tokens` tokens are computed.

    The context is the adapter, salt, media and embeddings. The result is empty for a request that
    has none of them. The prefill engine and the decode engine must compute the same digest. Media
    are identified by vLLM's hashes. An adapter is identified by its files, or by its name if the
    files cannot be read.
    """
    about: dict[str, Any] = {
        "adapter": _adapter(getattr(request, "lora_request", None)),
        "salt": getattr(request, "cache_salt", None) or "",
        "media": [
            (media.identifier, media.mm_position.offset, media.mm_position.length)
            for media in getattr(request, "mm_features", None) or ()
            if media.mm_position.offset < tokens
        ],
        "embeds": _embeds(request, tokens),
    }
    used = {name: value for name, value in about.items() if value}
    if not used:
        return b""
    # A client chooses the salt, and JSON allows half of a surrogate pair.
    said = repr(sorted(used.items())).encode("utf-8", "surrogatepass")
    return blake2b(said, digest_size=16).digest()


def _adapter(adapter: Any) -> str:
    """Return the identity of a vLLM `LoRARequest`; empty for None."""
    if adapter is None:
        return ""
    identify = _identify.__wrapped__ if getattr(adapter, "load_inplace", False) else _identify
    return identify(adapter.lora_name, adapter.lora_int_id, adapter.lora_path)


@lru_cache(maxsize=1024)
def _identify(name: str, _: int, path: str) -> str:
    """Return the identity of the adapter that vLLM has loaded under a name and number.

    The first result is cached: vLLM loads an adapter once, even if its files change later.
    """
    folder = Path(path)
    if not path or not folder.is_dir():
        return f"name {name}"
    try:
        weights = folder_identity(folder)
        config = msgspec.json.decode((folder / "adapter_config.json").read_bytes(), type=dict)
    except (AtlasError, OSError, msgspec.DecodeError, msgspec.ValidationError):
        return f"name {name}"
    return f"{weights} {config_identity(config, **_NAMES)}"


def _embeds(request: Any, tokens: int) -> str:
    """Return a digest of the embeddings of a request's first tokens; empty without embeddings."""
    embeds = getattr(request, "prompt_embeds", None)
    if embeds is None:
        return ""
    import torch

    said = embeds[:tokens].detach().cpu().contiguous()
    mask = getattr(request, "prompt_is_token_ids", None)
    digest = blake2b(said.view(torch.uint8).numpy().tobytes(), digest_size=16)
    digest.update(repr((tuple(said.shape), str(said.dtype), mask and mask[:tokens])).encode())
    return digest.hexdigest()
