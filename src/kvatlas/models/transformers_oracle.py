"""Run a transformers model on the meta device, and list what each layer caches.

`build_config` builds the model that a config describes, and runs a few tokens. Tensors on the meta
device have shapes but no data, so that even the largest models take a few seconds and no memory.
This module needs torch and transformers, and the rest of this package imports it only to verify a
model.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import transformers
from torch.overrides import TorchFunctionMode

from kvatlas.models.cache_comparison import CachedLayer

TOKENS = 7
"""Length in tokens of the only sequence in the batch."""


class Built(NamedTuple):
    """A model that transformers built on the meta device, and the layers of its cache."""

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
            layers = _cached_layers(model(input_ids=tokens, use_cache=True))
            if not layers and "past_key_values" in inspect.signature(model.forward).parameters:
                # The output of some models does not contain their cache.
                cache = transformers.DynamicCache(config=config)
                model(input_ids=tokens, use_cache=True, past_key_values=cache)
                layers = tuple(map(_cached, cache.layers))
    return Built(named, model_class.__name__, values, parameters, layers)


def _cached_layers(output: Any) -> tuple[CachedLayer, ...]:
    cache = getattr(output, "past_key_values", None)
    cache = getattr(output, "cache_params", None) if cache is None else cache
    cache = getattr(cache, "self_attention_cache", cache)
    layers = [*map(_cached, getattr(cache, "layers", ()))]
    # MiniMax keeps the states of its linear layers next to the layers of its cache.
    for index, state in enumerate(getattr(cache, "linear_cache", ())):
        if isinstance(state, torch.Tensor):
            layers += [CachedLayer({})] * (index + 1 - len(layers))
            layers[index] = CachedLayer({"recurrent_states": tuple(state.shape[1:])})
    # RWKV-4 returns two shifted rows and three sums, each of all layers.
    states = getattr(output, "state", None) or ()
    for width, depth in [tuple(states[0].shape[1:])] if states else []:
        row = CachedLayer({"conv_states": (width, 3), "recurrent_states": (len(states) - 2, width)})
        layers = [row] * depth
    return tuple(layers)


def _cached(layer: Any) -> CachedLayer:
    tensors: dict[str, tuple[int, ...]] = {}
    for name, value in vars(layer).items():
        if not name.startswith("_"):
            tensors |= _shapes(name, value)
    return CachedLayer(tensors, getattr(layer, "sliding_window", None))


def _shapes(name: str, value: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a tensor, or of a list or dict of tensors, without the batch axis."""
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
    """A torch mode that lets models run on the meta device, where tensors have no data.

    Some operations of models need data, for example the test whether a mask is all ones. In this
    mode, these operations return the result for one sequence without padding.
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


def _ones(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu")


_ANSWERS: dict[Any, Any] = {
    torch.Tensor.__bool__: lambda _: True,
    torch.Tensor.__contains__: lambda _: False,
    torch.Tensor.__int__: lambda _: 1,
    torch.Tensor.item: lambda _: 1,
    torch.Tensor.cpu: _ones,
    torch.Tensor.tolist: lambda tensor: _ones(tensor).tolist(),
    torch.Tensor.nonzero: _first_place,
    torch.nonzero: _first_place,
}
