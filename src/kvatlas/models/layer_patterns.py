"""Which layer is of which kind: the many ways in which configs write a pattern.

A pattern is a list of words, a string of letters, an interval, a list of layers
counted from 0 or from 1, or a rule of the family that the config leaves out. Each
becomes one word for each layer here, so that readers ask "what is layer 7" and
nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

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

# Words for the layers of hybrids; "linear_attention" is transformers' word for any recurrence.
_ATTENDS = ("attention", "full_attention")
_RECURS = ("mamba", "linear_attention")
CONVOLVES = ("conv", "short_conv")

_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def attention_kinds(config: Config, *, every: int | None = None) -> list[Kind]:
    """Full, sliding or chunked for each layer.

    `every` is the family's interval where the config has no pattern: each
    `every`-th layer is full.

    >>> attention_kinds(Config({"num_hidden_layers": 3, "sliding_window": 8}), every=3)
    ['sliding', 'sliding', 'full']
    """
    depth = config.depth()
    if config.has("layer_types"):
        words = config.per_layer("layer_types", depth, extra=config.predictors())
        return [_kind(word) for word in words]
    window = config.size("sliding_window")
    if window is None or not config.flag("use_sliding_window", default=True):
        return ["full"] * depth
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, str):
        return _lettered(pattern, depth)
    every = config.maybe("sliding_window_pattern", "_sliding_window_pattern") or every
    if every is not None:
        return ["sliding" if (i + 1) % every else "full" for i in range(depth)]
    if config.flag("use_sliding_window"):
        first = config.size("max_window_layers") or 0
        return ["sliding" if i >= first else "full" for i in range(depth)]
    # A window that no request can fill never slides.
    longest = config.maybe("max_position_embeddings")
    return ["full" if longest and window >= longest else "sliding"] * depth


def chunked_kinds(config: Config) -> list[Kind]:
    """Llama 4: layers with rotary positions are chunked, each fourth has none and is full."""
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
    """Gemma-4: each sixth layer is full, and the last whatever the pattern says."""
    return [*attention_kinds(config, every=6)[:-1], "full"]


def block_kinds(config: Config) -> list[str]:
    """The words of a hybrid: from its list, its letters, its interval or its list of layers.

    >>> block_kinds(Config({"hybrid_override_pattern": "M*-E"}))
    ['mamba', 'attention', 'mlp', 'moe']
    >>> block_kinds(Config({"num_hidden_layers": 3, "attn_layer_indices": [1]}))
    ['mamba', 'attention', 'mamba']
    """
    depth = config.depth()
    letters = config.get("hybrid_override_pattern")
    if isinstance(letters, str):
        if unknown := set(letters) - set(_LETTERS):
            problem = "hybrid_override_pattern has unknown letters"
            raise bad(problem, "".join(sorted(unknown)), f"Write it in {' '.join(_LETTERS)}")
        if len(letters) != depth:
            problem = "hybrid_override_pattern does not have one letter for each layer"
            raise bad(problem, f"{len(letters)} letters for {depth} layers")
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
    """A hybrid's caches: `recurrent`, called `name`, in the layers that are not attention."""
    attends = cache(attention or decoder.attention)
    for index, kind in enumerate(kinds):
        if kind in _ATTENDS:
            yield decoder.layer(index, attends())
        elif kind in recurs:
            yield decoder.layer(index, recurrent, name)
        elif kind not in without_cache:
            known = (*_ATTENDS, *recurs, *without_cache)
            raise bad("A hybrid has a layer of an unknown kind", kind, f"Use {', '.join(known)}")


def owns_cache(config: Config) -> int:
    """Layers up to the first that reads another's cache, as in Gemma-3n and some Gemma-4."""
    depth, shared = config.depth(), config.size("num_kv_shared_layers") or 0
    if shared >= depth:
        got = f"num_kv_shared_layers {shared} of {depth} layers"
        raise bad("No layer is left that owns a cache", got)
    return depth - shared


def _kind(word: object) -> Kind:
    if not isinstance(word, str) or word not in _KINDS:
        problem = "A layer is neither full, sliding nor chunked attention"
        raise bad(problem, word, f"Use one of {', '.join(_KINDS)}")
    return _KINDS[word]


def _lettered(pattern: str, depth: int) -> list[Kind]:
    """`LLLG`: local and global, repeated."""
    if not pattern or set(pattern) - {"L", "G"}:
        problem = "sliding_window_pattern is neither a number nor letters L and G"
        raise bad(problem, pattern, "Check it")
    return ["sliding" if pattern[i % len(pattern)] == "L" else "full" for i in range(depth)]
