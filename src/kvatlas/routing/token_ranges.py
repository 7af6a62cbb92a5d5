"""Which states of a lane a token range stands for: what a window has left behind stays there."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import integer
from kvatlas.planning import SLIDING_KINDS, Group

Span = tuple[int, int]


def token_range(tokens: Any, most: int) -> Span:
    """(start, stop) of a number of tokens, or of a pair or range from outside.

    >>> token_range(100, 512), token_range((32, 100), 512)
    ((0, 100), (32, 100))
    """
    if isinstance(tokens, range):
        pair: tuple[Any, ...] = (tokens.start, tokens.stop) if tokens.step == 1 else ()
    elif isinstance(tokens, tuple | list):
        pair = tuple(tokens)
    else:
        pair = (0, tokens)
    if len(pair) != 2:
        raise _bad(tokens, most)
    start, stop = (integer(edge, "a token") for edge in pair)
    if not 0 <= start <= stop <= most:
        raise _bad(tokens, most)
    return start, stop


def _bad(tokens: Any, most: int) -> AtlasError:
    return AtlasError(
        Code.BAD_TOKENS,
        f"Tokens are a number, or a start and a stop, within 0..{most}",
        got=repr(tokens),
        hint="Pass tokens=n for the first n, or tokens=(start, stop)",
    )


class Reach(NamedTuple):
    """Which tokens of a layer are still needed once the last one is known.

    All of them, unless a window or a chunk has left some behind; an encoder's states are
    needed whatever the tokens are.
    """

    window: int | None = None
    chunk: int | None = None
    source: int | None = None

    def states(self, per_state: int, start: int, stop: int) -> Span:
        """(first, stop) of the states that move for tokens start .. stop - 1.

        A window needs what the next token still sees, a chunk what it has begun.

        >>> Reach(window=128).states(1, 0, 1000), Reach().states(4, 0, 1001)
        ((873, 1000), (0, 250))
        """
        if self.source is not None:
            return 0, self.source // per_state
        if self.window is not None:
            start = max(start, stop - self.window + 1)
        if self.chunk is not None:
            start = max(start, stop // self.chunk * self.chunk)
        return min(start, stop) // per_state, stop // per_state


def reach_of(src: Group, dst: Group) -> Reach:
    """What moves between two groups: what both keep."""
    windows = [g.window for g in (src, dst) if g.window and g.kind in SLIDING_KINDS]
    chunked = "chunked_local_attention"
    chunks = [g.window for g in (src, dst) if g.window and g.kind == chunked]
    sources = [g.source for g in (src, dst) if g.kind == "cross_attention"]
    return Reach(min(windows, default=None), min(chunks, default=None), min(sources, default=None))
