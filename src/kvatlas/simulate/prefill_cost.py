"""The cost model of prefill: the FLOPs and seconds that hits save.

A token costs 2 FLOPs for each active parameter. Attention adds, in each query head and for each
pair of a query and a visible key, 2 FLOPs per element of the key and of the value. Seconds are
FLOPs divided by a sustained rate that does not depend on the batch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvatlas.models import Model, Weights
from kvatlas.simulate.traces import Ints
from kvatlas.specs import Attention, Spec

TFLOPS = 400.0
"""Sustained TFLOPS of one GPU: about 40% of the bf16 peak of an H100 or H200."""
DECODE_SECONDS = 0.02
"""Seconds to decode one token of an answer, if arrival times are simulated."""
_ACTIVE = re.compile(r"-A(\d+(?:\.\d+)?)B\b", re.IGNORECASE)


@dataclass(frozen=True)
class PrefillCost:
    """A cost model of prefill: how many FLOPs the tokens of a prompt take.

    A token takes `per_token` FLOPs. For each item (window, FLOPs) of `pairs`, it also takes these
    FLOPs for each key to which the token attends in the window.

    >>> cost = PrefillCost(per_token=10.0, pairs=((None, 2.0), (4, 1.0)))
    >>> cost.flops(np.array([0, 10]), np.array([10, 12]))
    array([244.,  74.])
    """

    per_token: float
    pairs: tuple[tuple[int | None, float], ...] = ()
    """(window, FLOPs per pair of query and key), summed over all layers with this window."""
    tflops: float = TFLOPS

    @classmethod
    def of(cls, model: Model, active: int, *, tflops: float = TFLOPS) -> PrefillCost:
        """Return the cost model of a model with `active` active parameters."""
        pairs: dict[int | None, float] = {}
        for layer in model.layers:
            seen = layer.spec.visibility
            window = seen.window or seen.chunk
            each = 2.0 * model.attention_heads * _row(layer.spec)
            pairs[window] = pairs.get(window, 0.0) + each
        return cls(2.0 * active, tuple(pairs.items()), tflops)

    def flops(self, start: Ints, stop: Ints) -> NDArray[np.float64]:
        """Return, for each prompt i, the FLOPs of its tokens start[i] .. stop[i] - 1."""
        total = self.per_token * (stop - start)
        for window, each in self.pairs:
            total = total + each * (_seen(stop, window) - _seen(start, window))
        return np.asarray(total, np.float64)

    def seconds(self, flops: float) -> float:
        """Return the seconds that `flops` take at the sustained rate."""
        return flops / (self.tflops * 1e12)


def active_parameters(weights: Weights) -> int | None:
    """Return the number of active parameters per token; None if it is unknown.

    For an MoE model, the number is taken from the model's name.

    >>> active_parameters(Weights.load("Qwen3-30B-A3B"))
    3000000000
    """
    named = _ACTIVE.search(weights.name)
    if named:
        return int(float(named[1]) * 1e9)
    outside = ("embedding", "tower", "mtp")
    if "experts" in weights.classes:
        return None
    return sum(c.parameters for kind, c in weights.classes.items() if kind not in outside)


def _row(spec: Spec) -> int:
    """Return the elements of one key plus the elements of one value, for one query head."""
    if isinstance(spec, Attention):
        return 2 * spec.head_dim
    return int(getattr(spec, "latent", 0) * 2 + getattr(spec, "rope", 0))


def _seen(count: Ints, window: int | None) -> NDArray[np.float64]:
    """Return the number of (query, key) pairs in attention over the first `count` tokens."""
    tokens = count.astype(np.float64)
    if window is None:
        return tokens * (tokens + 1) / 2
    begun: NDArray[np.float64] = np.minimum(tokens, window)
    return begun * (begun + 1) / 2 + (tokens - begun) * window
