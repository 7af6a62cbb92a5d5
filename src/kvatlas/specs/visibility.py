"""Attention masks as one value: windows, chunks, sink tokens and encoders.

Kernels use a `Visibility` to mask, planners to count blocks, and routes to skip tokens that
no later token attends to. The methods of `Visibility` use only plain arithmetic, so positions may
be ints, numpy arrays or tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Visibility(NamedTuple):
    """The tokens that a query attends to.

    >>> sliding = Visibility(window=4, sink_tokens=1)
    >>> [token for token in range(12) if sliding.sees(9, token)]
    [0, 6, 7, 8, 9]
    """

    causal: bool = True
    """Whether a query attends only to itself and earlier tokens; False for encoders."""
    window: int | None = None
    """Size of the sliding window in tokens, including the query itself."""
    chunk: int | None = None
    """Chunk size in tokens; a query attends only to tokens of the same chunk."""
    sink_tokens: int = 0
    """Number of tokens at the beginning that stay visible outside the window."""
    source: int | None = None
    """Number of encoder tokens, for cross-attention."""

    def first(self, position: Any) -> Any:
        """Return the first token that a query at `position` attends to, ignoring sink tokens.

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
        """Return whether a query at `position` attends to `token`; arrays are broadcast."""
        if not self.causal:
            return (token >= 0) & (position >= 0)
        return (token <= position) & ((token >= self.first(position)) | (token < self.sink_tokens))
