"""Compare the caches of a `Model` with the tensors that transformers caches.

For most models, vLLM and transformers cache the same rows, in different memory layouts. Each
decoder layer is compared separately: the heads and sizes of K and V, the latent rows, the keys of
an indexer, the channels and inputs of a convolution, the elements of a recurrent state, and the
window.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvatlas.models.layer import Layer
from kvatlas.specs import (
    Attention,
    ChunkedAttention,
    CompressorState,
    CrossAttention,
    Indexer,
    LatentAttention,
    Recurrent,
    Ring,
    SlidingAttention,
    SlidingLatentAttention,
)

ENGINES_DIFFER = {
    "deepseek_v4": "transformers caches tokens of incomplete groups; vLLM caches compressor sums",
    "recurrent_gemma": "transformers keeps recurrent states in its modules, not in its cache",
    "openai-gpt": "transformers caches nothing and recomputes all tokens in every step",
    "minicpm3": "transformers caches latent rows; vLLM caches K and V for each head",
    "qwen4_exp_text": "transformers caches an indexer row per token; vLLM compresses these rows",
}
"""Model types whose caches differ between vLLM, which `Model` describes, and transformers."""

_REPEATS = ("falcon",)
"""Model types where transformers may cache K and V once per query head instead of KV head."""

_WINDOW_OFFSETS = {"cohere2": 1, "cohere2_moe": 1, "mimo_v2_flash": -1}
"""Tokens by which vLLM's window is larger than that of transformers, by model type."""


class CachedLayer(NamedTuple):
    """The cache of one decoder layer: the shapes of its tensors, without the batch axis."""

    tensors: dict[str, tuple[int, ...]]
    """Shapes by name: keys, values, indexer_keys, conv_states, recurrent_states and so on."""
    window: int | None = None
    """Number of most recent tokens that stay in the cache; None if all tokens stay."""

    def elements(self) -> int:
        """Return the number of elements of all tensors."""
        return sum(math.prod(shape) for shape in self.tensors.values())


def differences(
    caches: Sequence[Layer],
    built: Sequence[CachedLayer],
    *,
    model_type: str = "",
    longest: int | None = None,
) -> list[str]:
    """Return one sentence for each decoder layer whose cache differs in transformers.

    `caches` were read from a config by kvatlas, and `built` were built by transformers. A window of
    at least `longest` tokens, the longest context, counts as no window.
    """
    ours, offset = _expected(caches), _WINDOW_OFFSETS.get(model_type, 0)
    sparse = any("indexer_keys" in layer.tensors for layer in built)
    found = []
    for index in range(max(len(built), 1 + max(ours, default=-1))):
        theirs = _observed(built[index]) if index < len(built) else {}
        if "window" in theirs:
            theirs["window"] += offset
            if longest is not None and longest <= theirs["window"] and "window" not in ours[index]:
                del theirs["window"]
        if model_type in _REPEATS and ours[index].keys() == theirs.keys():
            theirs |= {name: (ours[index][name][0], theirs[name][1]) for name in theirs}
        if sparse and _is_expanded(caches, index, theirs):
            theirs |= {name: ours[index][name] for name in ("keys", "values")}
        if ours[index] != theirs:
            found.append(f"layer {index}: kvatlas reads {ours[index]}, transformers has {theirs}")
    return found


def _is_expanded(caches: Sequence[Layer], index: int, theirs: dict[str, Any]) -> bool:
    """Return whether transformers has expanded latent rows to K and V for each head.

    transformers does this for sparse MLA in releases before 5.23. The sizes of the rows can then
    not be compared.
    """
    several = theirs.get("keys", (1,))[0] > 1
    return several and any(
        layer.index == index and isinstance(layer.spec, LatentAttention) for layer in caches
    )


def _expected(caches: Sequence[Layer]) -> defaultdict[int, dict[str, Any]]:
    """Return the sizes that `caches` imply, by decoder layer and tensor name."""
    found: defaultdict[int, dict[str, Any]] = defaultdict(dict)
    counts: defaultdict[int, int] = defaultdict(int)
    doubled = any(".self_attn.1." in layer.name for layer in caches)
    for layer in caches:
        index = layer.index
        if doubled:  # LongCat's layers have two attentions, which transformers counts as layers
            counts[index] += 1
            index = 2 * index + counts[index] - 1
        found[index] |= _of_spec(layer.spec)
    return found


def _of_spec(spec: Any) -> dict[str, Any]:
    if isinstance(spec, CrossAttention | CompressorState | Ring):
        return {}  # no rows without an encoder's input; no counterpart in transformers
    if isinstance(spec, LatentAttention):
        rows: dict[str, Any] = {"keys": (1, spec.latent), "values": (1, spec.rope)}
        return rows | _window(spec.window if isinstance(spec, SlidingLatentAttention) else None)
    if isinstance(spec, Indexer):
        compressed = {"tokens_per_key": spec.compress} if spec.compress > 1 else {}
        return {"indexer_keys": (spec.head_dim,), **compressed}
    if isinstance(spec, Attention):
        sizes = {
            "keys": (spec.heads, spec.head_dim),
            "values": (spec.heads, spec.v_dim or spec.head_dim),
        }
        if isinstance(spec, SlidingAttention):
            return sizes | _window(spec.window)
        return sizes | _window(spec.chunk if isinstance(spec, ChunkedAttention) else None)
    return _of_states(spec) if isinstance(spec, Recurrent) else {}


def _of_states(spec: Recurrent) -> dict[str, Any]:
    """Return the channels and taps of a layer's convolution, and the elements of its states."""
    found: dict[str, Any] = {}
    for state in spec.layer_states():
        sizes = dict(state.axes)
        if state.name == "conv":
            found["conv"] = (sizes["R"], sizes["T"])
        else:
            found["recurrent"] = found.get("recurrent", 0) + math.prod(sizes.values())
    return found


def _window(tokens: int | None) -> dict[str, Any]:
    return {} if tokens is None else {"window": tokens}


def _observed(layer: CachedLayer) -> dict[str, Any]:
    """Return the sizes of a layer's tensors in transformers, with the keys of `_expected`."""
    found = _window(layer.window)
    for name, shape in layer.tensors.items():
        if name in ("keys", "values"):
            found[name] = (shape[0], shape[-1])
        elif name == "indexer_keys":
            found[name] = shape[-1:]
        elif name == "conv_states":
            # vLLM stores the inputs before the current one. transformers also stores that one.
            found["conv"] = (shape[0], shape[-1] - 1)
        elif name == "recurrent_states":
            found["recurrent"] = math.prod(shape)
        elif name != "indexer_position_ids":
            found[name] = shape
    return found
