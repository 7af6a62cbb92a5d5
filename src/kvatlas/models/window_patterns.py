"""Readers for models whose config class computes which layers have a sliding window.

transformers writes the result to `layer_types`. The config of a checkpoint may omit this list, and
then the rule of the model's config class applies.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvatlas.models.config import missing
from kvatlas.models.decoder import Decoder, Kind
from kvatlas.models.dense import Sizes, dense
from kvatlas.models.layer import Layer
from kvatlas.models.layer_patterns import WINDOW_KEYS, attention_kinds


def listed(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of a model whose layers have a window only if `layer_types` lists them."""
    if decoder.config.has("layer_types"):
        return dense(decoder)
    decoder.config.settled(*WINDOW_KEYS)
    return decoder.every_layer(decoder.attention())


def first_full(decoder: Decoder, *, every: int) -> Iterator[Layer]:
    """Yield the caches of a model where layers 0, `every`, 2 x `every`, ... are full attention."""
    return dense(decoder, kinds=attention_kinds(decoder.config, every=every, first=True))


def last_full(decoder: Decoder, *, every: int) -> Iterator[Layer]:
    """Yield the caches of a model: full attention in one of `every` layers, and in the last."""
    kinds = attention_kinds(decoder.config, every=every)
    if not decoder.config.has("layer_types"):
        kinds[-1] = "full"
    return dense(decoder, kinds=kinds)


def flint(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of Flint: the first two, every fourth and the last layer are full."""
    config, last = decoder.config, decoder.depth - 1
    if config.has("layer_types") or not config.size("sliding_window"):
        return dense(decoder)
    full = [i < 2 or i % 4 == 1 or i == last for i in range(decoder.depth)]
    kinds: list[Kind] = ["full" if one else "sliding" for one in full]
    return dense(decoder, kinds=kinds)


def modernbert(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of ModernBERT's decoder: every third layer is full attention.

    The window is half of `local_attention`, because this key counts tokens on both sides.
    """
    config = decoder.config
    config.settled("local_attention")
    window = config.size("sliding_window") or config.count("local_attention", default=128) // 2
    kinds = attention_kinds(config.completed({"sliding_window": window}), every=3, first=True)
    sizes: dict[str, Sizes] = {"sliding": {"window": window}}
    return dense(decoder, kinds=kinds, sizes=sizes)


def smollm3(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of SmolLM3: with `use_sliding_window`, layers without RoPE have a window."""
    config, depth = decoder.config, decoder.depth
    windowed = config.flag("use_sliding_window") and config.has("sliding_window")
    if config.has("layer_types") or not windowed:
        return dense(
            decoder, kinds=attention_kinds(config.completed({"use_sliding_window": False}))
        )
    if config.listing("no_rope_layers"):
        rotary = config.per_layer("no_rope_layers", depth)
    else:
        every = config.count("no_rope_layer_interval", default=4)
        rotary = [(i + 1) % every for i in range(depth)]
    kinds: list[Kind] = ["full" if flag else "sliding" for flag in rotary]
    return dense(decoder, kinds=kinds)


def recurrent_stacks(decoder: Decoder) -> Iterator[Layer]:
    """Yield the caches of HRM-Text, which runs its layers several times, with a cache for each run.

    In transformers' configs, the number of layers counts every run, and the separate key
    `num_layers_per_stack` has the number of layers in a stack. An older config lacks this key and
    raises an error, because its number of layers counts the layers of one stack.
    """
    config = decoder.config
    if not config.has("num_layers_per_stack"):
        raise missing("num_layers_per_stack")
    return dense(decoder)
