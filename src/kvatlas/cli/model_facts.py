"""Properties of models and layouts that need no plan, for the commands `models` and `layouts`."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import pairwise
from typing import Any

import msgspec

from kvatlas.geometry import ENGINE_LAYOUTS
from kvatlas.models import Model
from kvatlas.planning import BACKENDS
from kvatlas.planning.backends import ANY_ORDER
from kvatlas.planning.sized_layers import FIXED_KINDS, FULL_KINDS, kind_of
from kvatlas.specs import AnySpec, EncoderOnlyAttention


def model_facts(model: Model) -> dict[str, Any]:
    """Return a model's properties and cache sizes, at tp 1 and without padding."""
    per_token = sum(grows(layer.spec) for layer in model.layers)
    return {
        "name": model.name,
        "architecture": model.architecture,
        "depth": model.depth,
        "layers": _layers_by_kind(model),
        "bytes_per_token": int(per_token) if per_token == int(per_token) else per_token,
        "fixed_bytes_per_request": sum(fixed(layer.spec) for layer in model.layers),
        "max_len": model.max_len,
        "attention_heads": model.attention_heads,
        "dtype": model.dtype,
        "cache": model.cache,
        "confidence": model.confidence,
        "source": model.source,
        "warnings": list(model.warnings),
    }


def _layers_by_kind(model: Model) -> dict[str, int]:
    """Return the number of layers of each cache kind.

    A layer with two caches of one kind counts once.

    >>> _layers_by_kind(Model.load("DeepSeek-V3.2"))
    {'mla_attention': 61}
    """
    kept = dict.fromkeys((layer.index, kind_of(layer.spec)) for layer in model.layers)
    return dict(Counter(kind for _, kind in kept))


def grows(spec: AnySpec) -> float:
    """Return the bytes that each further token adds to a layer's cache.

    >>> from kvatlas.specs import FullAttention, SlidingAttention
    >>> grows(FullAttention(heads=8, head_dim=128))
    4096.0
    >>> grows(SlidingAttention(heads=8, head_dim=128, window=128))
    0
    """
    if kind_of(spec) not in FULL_KINDS or isinstance(spec, EncoderOnlyAttention):
        return 0
    return _per_token(spec)


def fixed(spec: AnySpec) -> int:
    """Return the bytes that a layer's window, ring or state takes for one request.

    These bytes do not depend on the length of the request.

    >>> from kvatlas.specs import SlidingAttention
    >>> fixed(SlidingAttention(heads=8, head_dim=128, window=128))
    524288
    """
    if kind_of(spec) in FULL_KINDS:
        return 0
    if kind_of(spec) in FIXED_KINDS:
        return spec.page(1).unpadded
    seen = spec.visibility
    return int((seen.window or seen.chunk or seen.source or 0) * _per_token(spec))


@cache
def _per_token(spec: AnySpec) -> float:
    tokens = spec.tokens_per_state or 1
    return spec.page(tokens).unpadded / tokens


def layer_facts(model: Model) -> list[dict[str, Any]]:
    """Return one entry for each different layer cache of a model, with the layers that use it."""
    alike: dict[AnySpec, list[int]] = {}
    for layer in model.layers:
        alike.setdefault(layer.spec, []).append(layer.index)
    return [
        {
            "kind": kind_of(spec),
            "num_layers": len(indices),
            "layers": layer_runs(indices),
            "bytes_per_token": grows(spec),
            "fixed_bytes_per_request": fixed(spec),
            "spec": msgspec.to_builtins(spec),
        }
        for spec, indices in alike.items()
    ]


def layer_runs(indices: list[int]) -> str:
    """Return layer numbers as text, in ranges. Dots shorten long lists with a constant step.

    >>> layer_runs([0, 1, 2, 5, 6]), layer_runs([3, 7, 11, 15]), layer_runs([4])
    ('0-2, 5-6', '3, 7, ... 15', '4')
    """
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    steps = {(after[0] - before[0], len(after)) for before, after in pairwise(runs)}
    if len(runs) > 3 and len(steps) == 1 and len(runs[0]) == len(runs[1]):
        texts = [*texts[:2], f"... {texts[-1]}"]
    return ", ".join(texts)


def layout_facts() -> list[dict[str, Any]]:
    """Return the layouts that engines use, with properties and the backends that accept them."""
    traits = ("block_outermost", "layer_compact", "page_contiguous", "heads_outside_pages")
    takers = BACKENDS.values()
    return [
        {
            "order": layout.order,
            "alias": layout.alias,
            **{trait: getattr(layout, trait) for trait in traits},
            "backends": [x.name for x in takers if layout.order in (x.layouts or ANY_ORDER)],
        }
        for layout in ENGINE_LAYOUTS
    ]
