"""Nothing is as large as the cache: every tensor that a kernel makes is counted."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode

from kvatlas.kernels import (
    attend,
    attend_latent,
    copy_blocks,
    gather_blocks,
    read,
    read_latent,
    read_rows,
    read_states,
    write,
    write_latent,
    write_rows,
    write_states,
    zero_blocks,
)
from kvatlas.specs import (
    ATTENTION_CACHES,
    FullAttention,
    GatedDeltaNet,
    Indexer,
    LatentAttention,
    Spec,
)
from tests.guards import ORDERS, Guarded, small_plan
from tests.planning.models import model_of


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums the storage of every new tensor, also of those that are gone again at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.taken: int = 0

    def __torch_dispatch__(self, act: Any, types: Any, args: Any = (), more: Any = None) -> Any:
        homes = {a.untyped_storage().data_ptr() for a in _tensors((args, more))}
        made = act(*args, **(more or {}))
        for tensor in _tensors(made):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in homes:
                self.taken += storage.nbytes()
        return made


def _tensors(values: Any) -> list[Any]:
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, dict):
        values = list(values.values())
    return [t for one in values for t in _tensors(one)] if isinstance(values, list | tuple) else []


def large(spec: Spec, order: str, **more: Any) -> Any:
    """A layer in a pool of more than 8 MiB."""
    model = model_of("one kind", *[{"attn": spec}] * 2)
    made = small_plan(model, (9 << 20) // small_plan(model, 2, **more).bytes_per_block, **more)
    guarded = Guarded(small_plan(model, made.num_blocks, layout=order, **more))
    layer = guarded.cache["layers.1.attn"]
    assert layer.buffer.numel() > 8 << 20
    layer.buffer.zero_()
    return layer


def taken_by(act: Callable[[], Any]) -> int:
    with Counted():
        act()  # what is remembered from the first call on is not the call's own
    tracemalloc.start()
    try:
        with Counted() as counted:
            act()
        return int(counted.taken + tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


LIMIT = 1 << 20
"""An eighth of the pool; a quarter of the layer."""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("packing", ["cells", "planes", "transposed"])
def test_rows_and_blocks_take_what_moves(
    packing: Any, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.kernels.rows_by_slot._MANY", 1)
    if packing == "transposed" and order in ("LBNHC", "BLNHC"):
        return  # refused: see the adapters
    spec = FullAttention(heads=2, head_dim=32, packing=packing)
    layer = large(spec, order)
    other = large(spec, "LBHNC")
    rows = torch.randn(40, 2, 32)
    table = torch.tensor([[9, 700, 3]])
    ids = torch.tensor([5, 900, 77, 78, 79])
    near, far = torch.arange(40), torch.arange(40) * 97
    for act in (
        lambda: write(layer, rows, rows, near),
        lambda: write(layer, rows, rows, far),
        lambda: read(layer, near),
        lambda: read(layer, far),
        lambda: copy_blocks(layer, ids, other, ids.flip(0)),
        lambda: copy_blocks(other, ids, layer, ids.flip(0)),
        lambda: gather_blocks(layer, ids),
        lambda: zero_blocks(layer, ids),
        lambda: attend(
            layer, rows[:3], tables=table, lengths=torch.tensor([40]),
            queries=torch.tensor([3]),
        ),
    ):  # fmt: skip
        assert taken_by(act) < LIMIT


@pytest.mark.parametrize("cache", [c for c in ATTENTION_CACHES if c != "auto"])
def test_quantised_rows_take_what_moves(cache: str) -> None:
    spec = FullAttention(heads=2, head_dim=32, cache=cache)
    layer = large(spec, "LBNHC")
    rows = torch.randn(20, 2, 32)
    for slots in (torch.arange(20), torch.arange(20) * 97):
        assert taken_by(lambda s=slots: write(layer, rows, rows, s)) < LIMIT  # type: ignore[misc]
        assert taken_by(lambda s=slots: read(layer, s)) < LIMIT  # type: ignore[misc]


@pytest.mark.parametrize("order", ORDERS)
def test_latents_indexers_and_states_take_what_moves(order: str) -> None:
    latent = LatentAttention()
    layer = large(latent, order, block_size=64)
    rows, rope, slots = torch.randn(20, 512), torch.randn(20, 64), torch.arange(20) + 50
    q, table = torch.randn(2, 4, 576), torch.tensor([[1, 2]])
    index = Indexer()
    keys = large(index, order, block_size=64)
    delta = GatedDeltaNet(key_heads=2, value_heads=2, key_dim=16, value_dim=16)
    states = large(delta, order, prefix_caching=False)
    ids = torch.tensor([5, 1])
    held = read_states(states, ids)
    for act in (
        lambda: write_latent(layer, rows, rope, slots),
        lambda: read_latent(layer, slots),
        lambda: attend_latent(
            layer, q, tables=table, lengths=torch.tensor([20]),
            queries=torch.tensor([2]), scale=1.0,
        ),
        lambda: write_rows(keys, rows[:, :128], slots),
        lambda: read_rows(keys, slots),
        lambda: write_states(states, held, ids),
        lambda: read_states(states, ids),
    ):  # fmt: skip
        assert taken_by(act) < LIMIT


def test_a_copy_of_the_cache_would_be_seen() -> None:
    """The counter counts: numpy's memory by tracemalloc, torch's by its tensors."""
    layer = large(FullAttention(heads=2, head_dim=32), "BHLNC")
    assert taken_by(lambda: layer.k.contiguous()) > LIMIT
    assert taken_by(lambda: layer.k.permute(0, 2, 1, 3).reshape(-1, 2, 32)) > LIMIT
    assert taken_by(lambda: layer.tensor.numpy().copy()) > LIMIT
