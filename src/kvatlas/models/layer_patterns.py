"""Which layer is of which kind: the many ways in which configs write a pattern.

A pattern is a list of words, a string of letters, an interval, a list of layers
counted from 0 or from 1, or a rule of the family that the config leaves out. Each
becomes one word for each layer here, so that readers ask "what is layer 7" and
nothing else.
"""

from __future__ import annotations

from kvatlas.models.config import Config, bad
from kvatlas.models.decoder import Kind

_ATTENTION: dict[str, Kind] = {
    "full_attention": "full",
    "attention": "full",
    "global": "full",
    "global_attention": "full",
    "sliding_attention": "sliding",
    "sliding": "sliding",
    "sliding_window": "sliding",
    "local": "sliding",
    "local_attention": "sliding",
    "chunked_attention": "chunked",
}

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
            raise bad(
                f"hybrid_override_pattern is written in {' '.join(_LETTERS)}",
                "".join(sorted(unknown)),
                "Check the pattern",
            )
        if len(letters) != depth:
            raise bad(
                f"hybrid_override_pattern has one letter for each of the {depth} layers",
                f"{len(letters)} letters",
                "Check it against num_hidden_layers",
            )
        return [_LETTERS[letter] for letter in letters]
    for name in ("layers_block_type", "layer_types"):
        if config.has(name):
            words = config.per_layer(name, depth, extra=config.predictors())
            return [str(word) for word in words]
    if config.has("attn_layer_indices"):
        chosen = config.indices("attn_layer_indices", depth)
    elif config.has("full_attn_idxs"):
        chosen = config.indices("full_attn_idxs", depth)
    elif config.has("attn_layer_period"):
        every, offset = config.count("attn_layer_period"), config.natural("attn_layer_offset")
        chosen = {i for i in range(depth) if i % every == offset}
    else:
        every = config.count("full_attention_interval")
        chosen = {i for i in range(depth) if (i + 1) % every == 0}
    return ["attention" if i in chosen else "mamba" for i in range(depth)]


def owns_cache(config: Config) -> int:
    """Layers up to the first that reads another's cache, as in Gemma-3n and some Gemma-4."""
    depth, shared = config.depth(), config.size("num_kv_shared_layers") or 0
    if shared >= depth:
        raise bad(
            f"Fewer than all {depth} layers share a cache",
            f"num_kv_shared_layers {shared}",
            "Check it against num_hidden_layers",
        )
    return depth - shared


def _kind(word: object) -> Kind:
    found = _ATTENTION.get(word) if isinstance(word, str) else None
    if found is None:
        raise bad(
            "A layer of a plain decoder is full, sliding or chunked attention",
            word,
            f"Use one of {', '.join(_ATTENTION)}",
        )
    return found


def _lettered(pattern: str, depth: int) -> list[Kind]:
    """`LLLG`: local and global, repeated."""
    if not pattern or set(pattern) - {"L", "G"}:
        raise bad("sliding_window_pattern is a number or letters L and G", pattern, "Check it")
    return ["sliding" if pattern[i % len(pattern)] == "L" else "full" for i in range(depth)]
