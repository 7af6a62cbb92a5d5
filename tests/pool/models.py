"""Small models with every kind of group, in blocks of 16 tokens or a few."""

from __future__ import annotations

from typing import Any

from kvatlas.planning import Plan, plan
from kvatlas.specs import ChunkedAttention, Spec
from tests.planning.models import ATTENTION, DELTA, SLIDING, SMALL, model_of

CHUNKED: dict[str, Spec] = {"attn": ChunkedAttention(heads=4, head_dim=8, chunk=32)}
UNEVEN: dict[str, Spec] = {"attn": ChunkedAttention(heads=4, head_dim=8, chunk=24)}
MODELS = {
    "dense": SMALL["dense"],
    "sliding": SMALL["sliding"],
    "chunked": model_of("chunked", *[CHUNKED, ATTENTION] * 2),
    "uneven chunks": model_of("uneven chunks", *[UNEVEN, ATTENTION] * 2),
    "hybrid": model_of("hybrid", *[DELTA, DELTA, ATTENTION] * 2),
    "mixed": model_of("mixed", *[DELTA, SLIDING, ATTENTION] * 2),
    "compressed": SMALL["compressed"],
}


def small_plan(name: str, blocks: int, **options: Any) -> Plan:
    """A plan of one of the models with about `blocks` blocks in its first pool."""
    model = MODELS[name]
    options = {"max_len": 64, "in_flight": 0} | options
    sizing = plan(model, memory="1GiB", **options)
    share = sizing.pools[0].nbytes / sum(pool.nbytes for pool in sizing.pools)
    return plan(model, memory=int(blocks * sizing.bytes_per_block / share), **options)
