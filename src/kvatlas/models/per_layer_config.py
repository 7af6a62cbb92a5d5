"""`per_layer_config`: the sizes of single layers, as transformers saves them since version 5.

A config has one value of each setting for the whole model. `per_layer_config` contains the values
of layers that differ, by layer number; Gemma-4's full attention, for example, has fewer and larger
heads. A reader first uses the values of the whole model for every layer. `apply_per_layer` then
replaces these values in the layers that differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from msgspec.structs import replace

from kvatlas.models.config import Config, bad
from kvatlas.models.layer import Layer
from kvatlas.models.unread_keys import may_change_caches
from kvatlas.specs import AnySpec, Attention, Indexer, LatentAttention

_ATTENTION = {"num_key_value_heads": "heads", "head_dim": "head_dim", "v_head_dim": "v_dim"}
_LATENT = {"kv_lora_rank": "latent", "qk_rope_head_dim": "rope"}
_INDEXER = {"index_head_dim": "head_dim"}
_NO_EFFECT = {"num_attention_heads", "qk_nope_head_dim"}


def apply_per_layer(layers: Iterable[Layer], config: Config) -> Iterator[Layer]:
    """Yield `layers` with the sizes in the config's `per_layer_config`.

    Raises an error if a layer overrides a value that may change its cache in an unknown way.
    """
    given = config.section("per_layer_config")
    if given is None:
        yield from layers
        return
    section = given.with_text_keys()
    depth = config.depth()
    overrides = {_layer_number(key, depth): section.section(key) for key in section.all_keys()}
    for layer in layers:
        own = overrides.get(layer.index)
        yield layer if own is None else replace(layer, spec=_changed(layer, own))


def _layer_number(key: str, depth: int) -> int:
    if not key.isdecimal() or int(key) >= depth:
        hint = f"Write layer numbers, from 0 to {depth - 1}, as the keys of per_layer_config"
        raise bad("per_layer_config must be keyed by layer numbers", repr(key), hint)
    return int(key)


def _changed(layer: Layer, own: Config) -> AnySpec:
    spec = layer.spec
    names: dict[str, str] = {}
    # MLA computes heads from its latent rows, so the sizes of heads do not change the cache.
    no_effect = _NO_EFFECT | _INDEXER.keys() | _ATTENTION.keys()
    if isinstance(spec, LatentAttention):
        names = _LATENT
    elif isinstance(spec, Attention):
        names, no_effect = _ATTENTION, _NO_EFFECT | _INDEXER.keys()
    elif isinstance(spec, Indexer):
        names, no_effect = _INDEXER, _NO_EFFECT | _ATTENTION.keys() | _LATENT.keys()
    for key in own.all_keys():
        understood = key in no_effect or (key in names and own.has(key))
        if not understood and (key == "skip" or may_change_caches(key)):
            raise bad(
                f"per_layer_config changes {key}, which may change the cache of a layer",
                f"{own.get(key)!r} for layer {layer.index}, a {type(spec).__name__}",
                "Use the original config.json of the model, not one that `save_pretrained` wrote",
            )
    changes: dict[str, Any] = {}
    for key, name in names.items():
        value = own.maybe(key)
        if value is not None:
            changes[name] = value
    if changes.get("v_dim") == changes.get("head_dim", getattr(spec, "head_dim", None)):
        changes.pop("v_dim", None)
    return replace(spec, **changes)
