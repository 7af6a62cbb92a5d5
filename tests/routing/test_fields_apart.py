"""Plans whose fields are stored apart: routed to and from others, and every byte compared."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvatlas.planning import Plan
from kvatlas.specs import (
    FullAttention,
    GatedDeltaNet,
    Indexer,
    LatentAttention,
    Mamba2,
    SlidingAttention,
    SlidingLatentAttention,
    Spec,
)
from tests.routing.arrives import assert_arrives, assert_prepared_arrives
from tests.routing.cases import moving

pytest.importorskip("torch")

from tests.routing.converting import assert_converts, conversion_of
from tests.routing.fields_apart import apart
from tests.routing.oracle import Move
from tests.routing.strategies import models, planned, requests
from tests.routing.test_conversion import rewritten

quiet = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
each = settings(quiet, max_examples=max(5, settings().max_examples // 20))
KINDS: tuple[type[Spec], ...] = (
    FullAttention, SlidingAttention, LatentAttention, SlidingLatentAttention, Indexer, Mamba2,
    GatedDeltaNet,
)  # fmt: skip


@st.composite
def moves(draw: st.DrawFn, kind: type[Spec], *, from_start: bool = False) -> Move:
    """A request between two plans, of which one or both have their fields apart."""
    move = draw(requests(kind, from_start=from_start))
    which = draw(st.sampled_from([(True, False), (False, True), (True, True)]))
    source, destination = (
        apart(end, draw(st.integers(0, 1 << 20))) if chosen else end
        for end, chosen in zip((move.source, move.destination), which, strict=True)
    )
    seed = draw(st.integers(0, 99))
    return moving(source, destination, move.tokens, layers=move.layers, seed=seed)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_byte_arrives_once(kind: type[Spec]) -> None:
    some_apart = []

    @each
    @given(moves(kind))
    def run(move: Move) -> None:
        assert_arrives(move)
        plans = (move.source, move.destination)
        some_apart.append(any(region.apart for one in plans for region in one.regions))
        for one in plans:
            assert Plan.from_json(one.to_json()) == one

    run()
    assert sum(some_apart) >= each.max_examples // 2


@settings(quiet, max_examples=max(5, settings().max_examples // 10))
@given(st.data())
def test_prepared_routes_move_whole_chunks(data: st.DataObject) -> None:
    kinds: list[type[Spec]] = [FullAttention, LatentAttention, Indexer]
    kind = data.draw(st.sampled_from(kinds))
    assert_prepared_arrives(data.draw(moves(kind, from_start=True)))


@settings(quiet, max_examples=max(5, settings().max_examples // 10))
@given(st.data())
def test_formats_convert(data: st.DataObject) -> None:
    """Conversion by elements and by rows, with fields apart at either end."""
    kinds: list[type[Spec]] = [FullAttention, SlidingAttention, LatentAttention, GatedDeltaNet]
    model = data.draw(models(data.draw(st.sampled_from(kinds))))
    ends = [data.draw(rewritten(model)) for _ in range(2)]
    formats = {str(getattr(layer.spec, "cache", "")) for end in ends for layer in end.layers}
    assume(not any(name.startswith("turboquant") for name in formats))  # needs a rotation
    source, destination = (data.draw(planned(end, 96)) for end in ends)
    assume(conversion_of(source, destination))
    if which := data.draw(st.integers(0, 2)):
        source = apart(source, which)
    if which != 1:
        destination = apart(destination, data.draw(st.integers(0, 99)))
    stop = data.draw(st.integers(1, 96))
    assert_converts(moving(source, destination, stop, seed=data.draw(st.integers(0, 99))))
