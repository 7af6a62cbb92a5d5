"""Living caches for tests: small plans, and bytes around every pool that nothing may touch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")

from kvatlas import AtlasError, Code, Layout
from kvatlas.cache import Cache, bind
from kvatlas.geometry import ENGINE_LAYOUTS
from kvatlas.models import Model
from kvatlas.planning import Plan, plan
from kvatlas.specs import Spec
from kvatlas.specs.recurrent import Recurrent
from tests.planning.models import model_of

GUARD = 4096
BLOCKS = 24
ORDERS = [layout.order for layout in ENGINE_LAYOUTS]

_guarded: list[Any] = []


def guarded_bytes(nbytes: int) -> Any:
    """Memory with bytes around it that are looked at when the test is over."""
    raw = torch.full((nbytes + 2 * GUARD,), 0xA5, dtype=torch.uint8)
    _guarded.append(raw)
    return raw[GUARD : GUARD + nbytes]


def check_guards() -> None:
    for raw in _guarded:
        assert (raw[:GUARD] == 0xA5).all(), "bytes before a pool were written"
        assert (raw[-GUARD:] == 0xA5).all(), "bytes behind a pool were written"


@pytest.fixture(autouse=True)
def guarded_pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every pool that a test allocates has guards, which are whole at its end."""

    def memory(nbytes: int, zero: bool, device: Any) -> Any:
        assert str(device) == "cpu"
        found = guarded_bytes(nbytes + (2 << 20))
        found = found[-found.data_ptr() % (2 << 20) :][:nbytes]
        return found.zero_() if zero else found

    monkeypatch.setattr("kvatlas.cache.cache._memory", memory)
    _guarded.clear()
    yield
    check_guards()
    _guarded.clear()


class Guarded:
    """A plan's pools, guarded, full of 0xA5."""

    def __init__(self, made: Plan, rank: int = 0) -> None:
        pools = [pool for pool in made.pools if pool.stage == rank // made.tp]
        memory = {pool.index: guarded_bytes(pool.nbytes) for pool in pools}
        self.cache = bind(memory, made, rank=rank)

    def check(self) -> None:
        check_guards()


def small_plan(model: Model, blocks: int | None = None, **more: Any) -> Plan:
    """A plan of a small model, with just so many blocks if asked, else with few."""
    ask: dict[str, Any] = {"max_len": 64, "in_flight": 32, **more}
    made = plan(model, memory="32MiB", **ask)
    if blocks is not None:
        ask["max_len"] = 16
        two = plan(model, memory=made.bytes_per_block * max(blocks, 2), **ask)
        return two if blocks > 1 else _one_block(two)
    claimed = sum(pool.nbytes for pool in made.pools if pool.stage == 0)
    few = min(made.num_blocks, max(8, min(BLOCKS, (4 << 20) // made.bytes_per_block)))
    try:
        return plan(model, memory=claimed * few // made.num_blocks, **ask)
    except AtlasError as refusal:
        assert refusal.code is Code.NOT_ENOUGH_MEMORY
        return made


def _one_block(two: Plan) -> Plan:
    """A plan of one region with two blocks, with one: planners keep a null block besides."""
    (region,), (pool,) = two.regions, two.pools
    assert region.offset == 0
    apart = region.page_stride if Layout(two.layout).block_outermost else region.page_stride // 2
    return msgspec.structs.replace(
        two,
        pools=(msgspec.structs.replace(pool, blocks=1),),
        regions=(msgspec.structs.replace(region, page_stride=apart),),
    )


def spec_plan(
    spec: Spec, layout: str = "LBHNC", block: int | None = None, blocks: int | None = None
) -> Plan:
    """A plan of a model of two layers of one kind."""
    model = model_of("one kind", *[{"attn": spec}] * 2)
    # Saving prefixes would take further blocks of a recurrent layer.
    prefixes = not isinstance(spec, Recurrent)
    return small_plan(model, blocks, layout=layout, block_size=block, prefix_caching=prefixes)


def cache_of(spec: Spec, order: str, **more: Any) -> tuple[Guarded, Any]:
    """A guarded cache of three layers of one kind, zeroed, and the middle one."""
    guarded = Guarded(small_plan(model_of("one kind", *[{"attn": spec}] * 3), layout=order, **more))
    for pool in guarded.cache.pools.values():
        pool.zero_()
    return guarded, guarded.cache["layers.1.attn"]


def one_storage(cache: Cache, *tensors: Any) -> None:
    homes = {pool.untyped_storage().data_ptr() for pool in cache.pools.values()}
    assert all(tensor.untyped_storage().data_ptr() in homes for tensor in tensors)
