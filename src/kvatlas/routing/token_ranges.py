"""Validation of token ranges, and the states that must be copied for a token range."""

from __future__ import annotations

from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import integer
from kvatlas.planning import Plan
from kvatlas.specs import Visibility


def token_range(tokens: Any, most: int) -> tuple[int, int]:
    """Return `tokens` as (start, stop).

    `tokens` is a number, a pair or a range. Raises an error if stop exceeds `most`.

    >>> token_range(100, 512), token_range((32, 100), 512)
    ((0, 100), (32, 100))
    """
    pair: tuple[Any, ...] = (0, tokens)
    if isinstance(tokens, range):
        pair = (tokens.start, tokens.stop) if tokens.step == 1 else ()
    elif isinstance(tokens, tuple | list):
        pair = tuple(tokens)
    if len(pair) == 2:
        start, stop = (integer(edge, "a token") for edge in pair)
        if 0 <= start <= stop <= most:
            return start, stop
    problem = f"`tokens` must be a number or (start, stop) with 0 <= start <= stop <= {most}"
    hint = "Pass tokens=n for the first n tokens, or tokens=(start, stop)"
    raise AtlasError(Code.BAD_TOKENS, problem, got=repr(tokens), hint=hint)


def needed_states(visibility: Visibility, per_state: int, start: int, stop: int) -> tuple[int, int]:
    """Return (first, stop) of the states to copy for tokens `start .. stop - 1`.

    A window needs the states that the token at `stop` still sees; chunked attention needs the
    current chunk. An encoder's states are needed for every token range.

    >>> needed_states(Visibility(window=128), 1, 0, 1000), needed_states(Visibility(), 4, 0, 1001)
    ((873, 1000), (0, 250))
    """
    if visibility.source is not None:
        return 0, visibility.source // per_state
    first = min(max(start, visibility.first(stop)), stop)
    return first // per_state, stop // per_state


def ring_states(visibility: Visibility, start: int, stop: int) -> tuple[int, int]:
    """Return (first, stop) of the tokens whose rows in a ring are copied.

    A ring stores one chunk of tokens, which the model compresses together. Of the tokens
    start .. stop - 1, those in the same chunk as the last token are copied.

    >>> group = Visibility(chunk=4)
    >>> ring_states(group, 0, 11), ring_states(group, 0, 12), ring_states(group, 10, 12)
    ((8, 11), (8, 12), (10, 12))
    """
    return min(max(start, int(visibility.first(max(stop - 1, 0)))), stop), stop


def shared_visibility(source: Plan, destination: Plan, layer: str) -> Visibility:
    """Return the `Visibility` that determines which tokens of a layer must be copied.

    If both plans keep all tokens of the layer, all tokens are copied. Otherwise the visibility in
    the destination's spec, such as its window, applies.

    >>> from kvatlas.planning import plan
    >>> prefill, decode = (plan("gpt-oss-20b", memory="20GiB", tp=tp) for tp in (1, 2))
    >>> shared_visibility(prefill, decode, "model.layers.0.attn.attn").window
    128
    """
    groups = [plan.groups[plan.region_of(layer)[0].group] for plan in (source, destination)]
    partial = any(group.visibility != Visibility() for group in groups)
    return destination.spec(layer).visibility if partial else Visibility()
