"""Layer patterns: determine the kind of each layer from a config.

A config contains the pattern as a list of words, a string of letters, an interval, or a list
of layer numbers that start at 0 or at 1. If a config has no pattern, the family's default applies.
The functions here convert every form into a list with one word per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

from kvatlas.models.config import Config, bad
from kvatlas.models.decoder import Decoder, Kind
from kvatlas.models.layer import Layer
from kvatlas.specs import AnySpec

_SPELLINGS: dict[Kind, str] = {
    "full": "full_attention attention global global_attention",
    "sliding": "sliding_attention sliding sliding_window local local_attention",
    "chunked": "chunked_attention",
}
_KINDS = {word: kind for kind, words in _SPELLINGS.items() for word in words.split()}

# Layer types of hybrids; transformers writes "linear_attention" for any recurrent layer.
_ATTENDS = ("attention", "full_attention")
_RECURS = ("mamba", "linear_attention")
CONVOLVES = ("conv", "short_conv")

# Once the kind of each layer is known, these keys have no other effect.
WINDOW_KEYS = (
    "sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern",
    "_sliding_window_pattern", "layer_types", "prefix_dense_sliding_window_pattern",
)  # fmt: skip
# transformers computes `layer_types` from these keys.
_INTERVAL_KEYS = ("global_attn_every_n_layers", "local_attention")
_INTERVALS = ("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers")

_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def attention_kinds(config: Config, *, every: int | None = None, first: bool = False) -> list[Kind]:
    """Return the kind of each layer: full, sliding or chunked.

    `every` applies if the config has a window but no pattern. Layers are then taken in sets of
    `every` successive layers. In each set, one layer is full and the others are sliding. The full
    layer is the last of its set, or the first if `first` is true.

    >>> attention_kinds(Config({"num_hidden_layers": 3, "sliding_window": 8}), every=3)
    ['sliding', 'sliding', 'full']
    """
    depth = config.depth()
    config.settled(*WINDOW_KEYS)
    if config.has("layer_types"):
        config.settled(*_INTERVAL_KEYS)
        words = config.per_layer("layer_types", depth, extra=config.predictors())
        return [_kind(word) for word in words]
    window = config.size("sliding_window")
    if window is None or not config.flag("use_sliding_window", default=True):
        return ["full"] * depth
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, str):
        return _lettered(pattern, depth)
    if every is not None:
        every = config.maybe(*_INTERVALS) or every
    else:
        every = config.maybe("sliding_window_pattern", "_sliding_window_pattern")
    if every is not None:
        start = 0 if first else 1
        return ["sliding" if (i + start) % every else "full" for i in range(depth)]
    if config.flag("use_sliding_window"):
        before = config.size("max_window_layers") or 0
        return ["sliding" if i >= before else "full" for i in range(depth)]
    # A window as long as the context never slides.
    longest = config.maybe("max_position_embeddings")
    return ["full" if longest and window >= longest else "sliding"] * depth


def chunked_kinds(config: Config) -> list[Kind]:
    """Return the kind of each Llama 4 layer, chunked or full.

    Layers with rotary positions are chunked, and layers without them are full. By default,
    every fourth layer has no rotary positions.
    """
    depth = config.depth()
    if not config.size("attention_chunk_size"):
        return ["full"] * depth
    if config.has("layer_types"):
        return attention_kinds(config)
    if config.listing("no_rope_layers"):
        rotary = config.per_layer("no_rope_layers", depth)
        return ["chunked" if flag else "full" for flag in rotary]
    every = config.count("no_rope_layer_interval", default=4)
    return ["chunked" if (i + 1) % every else "full" for i in range(depth)]


def gemma4_kinds(config: Config) -> list[Kind]:
    """Return the kind of each Gemma-4 layer; by default, every sixth is full, others sliding.

    The last layer is full regardless of the pattern.
    """
    return [*attention_kinds(config, every=6)[:-1], "full"]


def block_kinds(config: Config) -> list[str]:
    """Return the type of each layer of a hybrid, such as `mamba` or `attention`.

    The config specifies the types as a list, a string of letters, an interval or the indices
    of the attention layers.

    >>> block_kinds(Config({"hybrid_override_pattern": "M*-E"}))
    ['mamba', 'attention', 'mlp', 'moe']
    >>> block_kinds(Config({"num_hidden_layers": 3, "attn_layer_indices": [1]}))
    ['mamba', 'attention', 'mamba']
    """
    depth = config.depth()
    letters = config.get("hybrid_override_pattern")
    if isinstance(letters, str):
        if unknown := set(letters) - set(_LETTERS):
            raise bad(
                "hybrid_override_pattern contains unknown letters",
                repr("".join(sorted(unknown))),
                f"Use only {' '.join(_LETTERS)}",
            )
        if len(letters) != depth:
            raise bad(
                "hybrid_override_pattern must have one letter per layer",
                f"{len(letters)} letters for {depth} layers",
            )
        return [_LETTERS[letter] for letter in letters]
    for name in ("layers_block_type", "layer_types"):
        if config.has(name):
            words = config.per_layer(name, depth, extra=config.predictors())
            return [str(word) for word in words]
    listed = next((n for n in ("attn_layer_indices", "full_attn_idxs") if config.has(n)), None)
    if listed is not None:
        chosen = config.indices(listed, depth)
    elif config.has("attn_layer_period"):
        every, offset = config.count("attn_layer_period"), config.natural("attn_layer_offset")
        chosen = {i for i in range(depth) if i % every == offset}
    else:
        every = config.count("full_attention_interval")
        chosen = {i for i in range(depth) if (i + 1) % every == 0}
    return ["attention" if i in chosen else "mamba" for i in range(depth)]


def hybrid_layers(
    decoder: Decoder,
    kinds: Sequence[object],
    recurrent: AnySpec,
    name: str,
    *,
    attention: Callable[[], AnySpec] | None = None,
    without_cache: tuple[str, ...] = (),
    recurs: tuple[str, ...] = _RECURS,
) -> Iterator[Layer]:
    """Yield the caches of a hybrid, a model with attention and recurrent layers.

    `kinds` lists the kind of each layer. Attention layers get the spec that `attention`
    returns. Layers whose kind is in `recurs` get the spec `recurrent` and the cache name
    `name`. Layers whose kind is in `without_cache` have no cache.
    """
    attends = cache(attention or decoder.attention)
    slides = cache(partial(decoder.attention, "sliding"))
    for index, kind in enumerate(kinds):
        if kind in _ATTENDS:
            yield decoder.layer(index, attends())
        elif kind == "sliding_attention":
            yield decoder.layer(index, slides())
        elif kind in recurs:
            yield decoder.layer(index, recurrent, name)
        elif kind not in without_cache:
            known = (*_ATTENDS, "sliding_attention", *recurs, *without_cache)
            raise bad(
                f"Layer {index} has an unknown type", repr(kind), f"Use one of {', '.join(known)}"
            )


def owns_cache(config: Config) -> int:
    """Return the number of leading layers that have a separate cache.

    In Gemma-3n and some Gemma-4 models, the last layers use the caches of earlier ones.
    """
    depth, shared = config.depth(), config.size("num_kv_shared_layers") or 0
    if shared >= depth:
        raise bad(
            "num_kv_shared_layers must be less than the number of layers",
            f"num_kv_shared_layers {shared} for {depth} layers",
        )
    return depth - shared


def _kind(word: object) -> Kind:
    if not isinstance(word, str) or word not in _KINDS:
        raise bad(
            "layer_types contains an unknown attention type",
            repr(word),
            f"Use one of {', '.join(_KINDS)}",
        )
    return _KINDS[word]


def _lettered(pattern: str, depth: int) -> list[Kind]:
    """Return one kind per layer from a pattern such as `LLLG` (L: sliding, G: full).

    The pattern repeats until every layer has a kind.
    """
    if not pattern or set(pattern) - {"L", "G"}:
        raise bad(
            "sliding_window_pattern must be a number or a string of L and G",
            repr(pattern),
            'Write a number such as 6, or a string such as "LLLG"',
        )
    return ["sliding" if pattern[i % len(pattern)] == "L" else "full" for i in range(depth)]
