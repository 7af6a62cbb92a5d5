"""Compare the caches that kvatlas reads from a config with those that transformers allocates.

`build_config` builds the model of a config on the meta device, whose tensors have shapes and no
data, and runs a few tokens. The largest models take a few seconds and no memory. `differences`
compares the shapes that each layer has cached with the specs of a model. This module needs torch
and transformers; the rest of this package does not import it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import transformers
from torch.overrides import TorchFunctionMode

from kvatlas.models.layer import Layer
from kvatlas.specs import (
    Attention,
    ChunkedAttention,
    CompressorState,
    CrossAttention,
    Indexer,
    LatentAttention,
    Recurrent,
    SlidingAttention,
    SlidingLatentAttention,
)

TOKENS = 7
"""Tokens of the only sequence of the batch."""

ENGINES_DIFFER = {
    "deepseek_v4": "transformers keeps open groups of tokens; vLLM keeps sums of a compressor",
    "minicpm3": "transformers caches latent rows; vLLM caches K and V for each head",
    "qwen4_exp_text": "transformers keeps the indexer's row of each token; vLLM compresses them",
}
"""Model types whose caches differ between vLLM, which `Model` describes, and transformers."""


class CachedLayer(NamedTuple):
    """The cache of one decoder layer: the shapes of its tensors, without the batch axis."""

    tensors: dict[str, tuple[int, ...]]
    """Shapes by name: keys, values, indexer_keys, conv_states, recurrent_states and so on."""
    window: int | None = None
    """Tokens that remain in the cache; None if all of them do."""

    def elements(self) -> int:
        """Return the number of elements of all tensors."""
        return sum(math.prod(shape) for shape in self.tensors.values())


class Built(NamedTuple):
    """One architecture as transformers builds it."""

    model_type: str
    architecture: str
    config: dict[str, Any]
    parameters: int
    layers: tuple[CachedLayer, ...]

    def bytes_by_layer(self, width: int = 2) -> list[int]:
        """Return the bytes that each layer has cached for `TOKENS` tokens."""
        return [width * layer.elements() for layer in self.layers]


def build_config(config: Any, model_class: Any = None, model_type: str | None = None) -> Built:
    """Build the model of a transformers config on the meta device and run it.

    `model_class` defaults to the causal language model of the config's type, or else to the
    model without a head.
    """
    if model_class is None:
        causal, every = transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING
        model_class = (causal if type(config) in causal else every)[type(config)]
    values, named = config.to_dict(), model_type or config.model_type
    # Musicgen reads several codebooks per step, each in a row of the batch.
    rows = getattr(config, "num_codebooks", None) if "musicgen" in named else 1
    with torch.device("meta"), torch.no_grad(), _default_dtype(torch.bfloat16):
        model = model_class(config).eval()
        parameters = sum(one.numel() for one in model.parameters())
        tokens = torch.ones((rows or 1, TOKENS), dtype=torch.long)
        with _Meta():
            output = model(input_ids=tokens, use_cache=True)
    layers = tuple(map(_cached, _layers_of(output)))
    return Built(named, model_class.__name__, values, parameters, layers)


def differences(caches: Sequence[Layer], built: Sequence[CachedLayer]) -> list[str]:
    """Return one sentence per decoder layer whose cache is another than transformers'."""
    ours = _expected(caches)
    found = []
    for index in range(max(len(built), 1 + max(ours, default=-1))):
        theirs = _observed(built[index]) if index < len(built) else {}
        if ours[index] != theirs:
            found.append(f"layer {index}: kvatlas reads {ours[index]}, transformers has {theirs}")
    return found


def _expected(caches: Sequence[Layer]) -> defaultdict[int, dict[str, Any]]:
    """Return what each decoder layer is expected to cache, by name."""
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
    if isinstance(spec, CrossAttention | CompressorState):
        return {}  # no rows without an encoder's input; no counterpart in transformers
    if isinstance(spec, LatentAttention):
        rows: dict[str, Any] = {"keys": (1, spec.latent), "values": (1, spec.rope)}
        return rows | _window(spec.window if isinstance(spec, SlidingLatentAttention) else None)
    if isinstance(spec, Indexer):
        return {"indexer_keys": (spec.head_dim,)}
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
    """Return the channels and taps of a convolution, and the elements of a recurrent state."""
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
    """Return the cache of a layer in the same terms as `_of_spec`, per token."""
    found = _window(layer.window)
    for name, shape in layer.tensors.items():
        if name in ("keys", "values"):
            found[name] = (shape[0], shape[-1])
        elif name == "indexer_keys":
            found[name] = shape[-1:]
        elif name == "conv_states":
            # vLLM stores the inputs before the current one, transformers the current one too.
            found["conv"] = (shape[0], shape[-1] - 1)
        elif name == "recurrent_states":
            found["recurrent"] = math.prod(shape)
        elif name != "indexer_position_ids":
            found[name] = shape
    return found


def _layers_of(output: Any) -> Any:
    cache = getattr(output, "past_key_values", None)
    cache = getattr(output, "cache_params", None) if cache is None else cache
    cache = getattr(cache, "self_attention_cache", cache)
    return getattr(cache, "layers", ())


def _cached(layer: Any) -> CachedLayer:
    tensors: dict[str, tuple[int, ...]] = {}
    for name, value in vars(layer).items():
        if not name.startswith("_"):
            tensors |= _shapes(name, value)
    return CachedLayer(tensors, getattr(layer, "sliding_window", None))


def _shapes(name: str, value: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a tensor, or of the tensors in a list or dict, without the batch."""
    if isinstance(value, torch.Tensor):
        return {name: tuple(value.shape[1:])}
    keyed: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        keyed = list(value.items())
    elif isinstance(value, list | tuple):
        keyed = list(enumerate(value))
    found = [(key, one) for key, one in keyed if isinstance(one, torch.Tensor)]
    return {
        name if len(found) == 1 else f"{name}.{key}": tuple(one.shape[1:]) for key, one in found
    }


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _Meta(TorchFunctionMode):
    """Answer the questions that need data, so that models run on the meta device.

    Modeling code asks whether a mask is all ones, for example. Each question is answered as for
    one sequence without padding.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensor = args[0] if args else None
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:
            if func is torch.where and len(args) == 1:
                return tuple(torch.zeros(1, dtype=torch.long) for _ in range(tensor.dim()))
            answer = _ANSWERS.get(func)
            if answer is not None:
                return answer(tensor)
            index = args[1] if len(args) > 1 and isinstance(args[1], torch.Tensor) else None
            masked = index is not None and index.dtype is torch.bool
            if func is torch.Tensor.__getitem__ and index is not None:
                if masked:
                    return tensor.flatten(0, index.dim() - 1)
                if index.dim() == 0:
                    return tensor[0]
            if func is torch.Tensor.__setitem__ and masked:
                return None
        return func(*args, **(kwargs or {}))


def _first_place(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros((1, tensor.dim()), dtype=torch.long, device="meta")


_ANSWERS: dict[Any, Any] = {
    torch.Tensor.__bool__: lambda _: True,
    torch.Tensor.__contains__: lambda _: False,
    torch.Tensor.__int__: lambda _: 1,
    torch.Tensor.item: lambda _: 1,
    torch.Tensor.tolist: lambda tensor: torch.ones(
        tensor.shape, dtype=tensor.dtype, device="cpu"
    ).tolist(),
    torch.Tensor.nonzero: _first_place,
    torch.nonzero: _first_place,
}
