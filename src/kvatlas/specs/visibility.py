"""Who sees what: windows, chunks, sink tokens and encoders, as one value.

Kernels mask by it, planners count blocks by it, routes leave out by it what no later
token sees. Its arithmetic is plain, so that positions may be ints, numpy arrays or tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Visibility(NamedTuple):
    """Which tokens a query sees.

    >>> sliding = Visibility(window=4, sink_tokens=1)
    >>> [token for token in range(12) if sliding.sees(9, token)]
    [0, 6, 7, 8, 9]
    """

    causal: bool = True
    """Nothing after the query; an encoder's tokens are all seen."""
    window: int | None = None
    """The last so many tokens, the query's own included."""
    chunk: int | None = None
    """Tokens from the last multiple of this on."""
    sink_tokens: int = 0
    """Tokens at the beginning that stay in sight of a window."""
    source: int | None = None
    """Tokens of the encoder, where those are what is seen."""

    def first(self, position: Any) -> Any:
        """The earliest token that a query at `position` sees, sink tokens aside.

        >>> Visibility(window=128).first(1000), Visibility(chunk=256).first(1000)
        (873, 768)
        """
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        if self.window is not None:
            reach = position - self.window + 1
            return reach * (reach > 0)
        return position * 0

    def sees(self, position: Any, token: Any) -> Any:
        """Whether a query at `position` sees `token`; both may be arrays that broadcast."""
        if not self.causal:
            return (token >= 0) & (position >= 0)
        return (token <= position) & ((token >= self.first(position)) | (token < self.sink_tokens))
