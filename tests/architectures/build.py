"""Build the causal language models of transformers on the meta device, and run a few tokens.

The tensors of the meta device have shapes and no data, so that the largest models are built and
run in about a second. `build` returns the config, the number of parameters, and the shapes of what
each layer has cached: these are the answers that kvatlas is compared with.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import transformers
from torch.overrides import TorchFunctionMode
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.architectures.buildable import NEEDED, NOT_BUILT, TEXT_ONLY

TOKENS = 7
"""Tokens of the only sequence of the batch."""


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


def model_types() -> list[str]:
    """Return the model types of the causal language models that can be built."""
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in NOT_BUILT]


def default_config(model_type: str) -> Any:
    """Return the default config of a model type, with the values that its model needs."""
    config = transformers.CONFIG_MAPPING[model_type](**NEEDED.get(model_type, {}))
    if model_type in TEXT_ONLY:
        text = config.get_text_config(decoder=True)
        config = type(text)(**NEEDED.get(text.model_type, {}))
    if getattr(config, "is_decoder", None) is False and not config.is_encoder_decoder:
        config.is_decoder = True
    return config


def build(model_type: str) -> Built:
    """Build one architecture from its default config and run it."""
    config = default_config(model_type)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    if model_type == "gemma3n":
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["gemma3n_text"]
    return build_config(config, getattr(transformers, name), model_type)


def build_config(config: Any, model_class: Any = None, model_type: str | None = None) -> Built:
    """Build the model of a transformers config on the meta device and run it.

    `model_class` defaults to the causal language model of the config's type.
    """
    if model_class is None:
        model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    values, named = config.to_dict(), model_type or config.model_type
    with torch.device("meta"), torch.no_grad(), _default_dtype(torch.bfloat16):
        model = model_class(config).eval()
        parameters = sum(one.numel() for one in model.parameters())
        with _Meta():
            rows = getattr(config, "num_codebooks", None) if "music" in named else 1
            output = model(input_ids=torch.ones((rows or 1, TOKENS), dtype=torch.long), use_cache=True)
    layers = tuple(map(_cached, _layers_of(output)))
    return Built(named, model_class.__name__, values, parameters, layers)


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
    if isinstance(value, dict):
        keyed = list(value.items())
    elif isinstance(value, list | tuple):
        keyed = list(enumerate(value))
    else:
        return {}
    found = [(key, one) for key, one in keyed if isinstance(one, torch.Tensor)]
    return {
        name if len(found) == 1 else f"{name}.{key}": tuple(one.shape[1:]) for key, one in found
    }


class _default_dtype:  # noqa: N801
    """Set torch's default dtype, and restore it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.before = dtype, torch.get_default_dtype()

    def __enter__(self) -> None:
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.before)


class _Meta(TorchFunctionMode):
    """Answer the questions that need data, so that models run on the meta device.

    Modeling code asks whether a mask is all ones, for example. Each question is answered as for
    one sequence without padding.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensor = args[0] if args else None
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:
            if func is torch.Tensor.__bool__:
                return True
            if func in (torch.Tensor.item, torch.Tensor.__int__):
                return 1
            if func is torch.Tensor.tolist:
                return torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu").tolist()
            if func is torch.Tensor.__contains__:
                return False
            if func in (torch.nonzero, torch.Tensor.nonzero):
                return torch.zeros((1, tensor.dim()), dtype=torch.long, device="meta")
            if func is torch.Tensor.__getitem__ and _is_mask(args[1]):
                return tensor.flatten(0, args[1].dim() - 1)
            if func is torch.Tensor.__setitem__ and _is_mask(args[1]):
                return None
            if func is torch.where and len(args) == 1:
                return tuple(torch.zeros(1, dtype=torch.long) for _ in range(tensor.dim()))
        return func(*args, **(kwargs or {}))


def _is_mask(index: object) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype is torch.bool
