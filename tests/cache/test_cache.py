"""Living caches: every view shares the pool's storage and shows the plan's own bytes."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvatlas import AtlasError, Code, Layout
from kvatlas.cache import ALIGNMENT, allocate, bind
from kvatlas.geometry.byte_sizes import size
from kvatlas.planning import plan
from tests.guards import ORDERS, Guarded, one_storage, small_plan
from tests.planning.models import SMALL


@pytest.mark.parametrize("name", list(SMALL))
def test_fields_lie_where_the_plan_says(name: str) -> None:
    """Writing one element through a view changes exactly the bytes that its placement names."""
    orders = plan(SMALL[name], memory="20MiB", max_len=64, in_flight=32).accepted_layouts
    for order in orders if name == "compressed" else ORDERS:
        check_fields(name, order)


def check_fields(name: str, order: str) -> None:
    made = small_plan(SMALL[name], layout=order)
    guarded = Guarded(made)
    for pool in guarded.cache.pools.values():
        pool.zero_()
    for layer in guarded.cache:
        for part, held in enumerate(guarded.cache.parts(layer)):
            one_storage(guarded.cache, held.tensor, *held.fields.values())
            for field, tensor in held.fields.items():
                placed = held.place(field)
                assert tuple(tensor.shape) == placed.sizes
                last = tuple(n - 1 for n in placed.sizes)
                at = placed(**dict(zip(placed.axes, last, strict=True)))
                tensor.view(torch.uint8)[last[:-1]][-placed.item :] = 0xFF
                touched = held.buffer[at : at + placed.item]
                assert (touched == 0xFF).all(), (layer, part, field)
                touched.zero_()
            assert not held.buffer.any(), (layer, part)  # nothing else was touched
    guarded.check()


@pytest.mark.parametrize("order", ORDERS)
def test_cross_layer_rows(order: str) -> None:
    made = small_plan(SMALL["dense"], layout=order)
    cache = allocate(made)
    if Layout(order).block_outermost:
        rows = cache.block([2, 4, 6])
        assert tuple(rows.shape) == (3, made.bytes_per_block)
        one_storage(cache, rows)
        for layer in cache.values():
            layer.tensor.zero_()
            layer.tensor[4] = 9
        assert (cache.block(4) == 9).all()
        assert (rows[0] == 0).all()
        bad = {(1, 0): Code.NOT_CONTIGUOUS, (0, 1, 3): Code.NOT_CONTIGUOUS}
        bad |= {(made.num_blocks,): Code.OUT_OF_RANGE, (): Code.OUT_OF_RANGE}
        for ids, code in bad.items():
            with pytest.raises(AtlasError) as refusal:
                cache.block(ids)
            assert refusal.value.code is code
    else:
        with pytest.raises(AtlasError) as refusal:
            cache.block(0)
        assert refusal.value.code is Code.NOT_CONTIGUOUS


def test_kernel_blocks_are_blocks_to_a_kernel() -> None:
    for order in ORDERS:
        made = small_plan(
            SMALL["dense"], layout=order, backend="FLASHINFER", block_size=128, max_len=256
        )
        layer = allocate(made)["layers.3.attn"]
        assert tuple(layer.k.shape) == (made.num_blocks * 2, 4, 64, 8)


def test_pools_are_aligned_and_states_start_at_zero() -> None:
    made = small_plan(SMALL["delta hybrid"])
    cache = allocate(made)
    for pool in cache.pools.values():
        assert pool.data_ptr() % ALIGNMENT == 0
        assert not pool.any()


def test_every_rank_of_a_pipeline_has_its_layers() -> None:
    made = small_plan(SMALL["sliding"], tp=2, pp=2)
    layers = [set(allocate(made, rank=rank)) for rank in range(4)]
    assert layers[0] == layers[1] != layers[2] == layers[3]
    assert layers[0] | layers[2] == set(made.layers)
    heads = [allocate(made, rank=r)["layers.0.attn"].page.field("k").ranges for r in (0, 1)]
    assert [pieces[0].start for pieces in heads] == [0, 2]
    with pytest.raises(AtlasError) as refusal:
        allocate(made, rank=0)["layers.5.attn"]
    assert refusal.value.code is Code.UNKNOWN_LAYER
    for rank in (-1, 4, True, 1.0):
        with pytest.raises(AtlasError) as refusal:
            allocate(made, rank=rank)  # type: ignore[arg-type]
        assert refusal.value.code is Code.BAD_RANK


def test_memory_of_others(tmp_path: Path) -> None:
    """A mapped file is a cache: what is written is in the file."""
    made = small_plan(SMALL["dense"])
    path = tmp_path / "pool"
    path.write_bytes(bytes(made.pools[0].nbytes))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        cache = bind(mapped, made)
        cache["layers.2.attn"].k[3, 1, 2, 4] = 1.0
        at = made.view("layers.2.attn", "k")(B=3, H=1, N=2, C=4)
        assert mapped[at : at + 2] == b"\x80\x3f"
        del cache


MEMORY: list[Any] = [bytearray(10), torch.zeros(10, dtype=torch.uint8), torch.zeros(1 << 26)]
MEMORY += ["text", None, {}, {1: bytearray(9)}]


def test_memory_that_does_not_fit_is_refused() -> None:
    made = small_plan(SMALL["dense"])
    for memory in MEMORY:
        with pytest.raises(AtlasError) as refusal:
            bind(memory, made)
        assert refusal.value.code in (Code.BAD_TENSOR, Code.OUT_OF_BOUNDS)


def test_a_cache_prints_itself() -> None:
    made = small_plan(SMALL["sliding"], tp=2, pp=2)
    text = repr(allocate(made, rank=3))
    held = size(sum(pool.nbytes for pool in made.pools if pool.stage == 1))
    layers = len(allocate(made, rank=3))
    expected = f"<Cache {made.model}, rank 3, cpu: {layers} layers in 1 pool, {held}>"
    assert text == expected
    assert "tensor(" not in repr(allocate(made)["layers.0.attn"])


@pytest.mark.parametrize("room", ["cache", "kernels"])
def test_without_torch_the_extra_is_named(room: str) -> None:
    code = f"""
import sys
sys.modules["torch"] = None
import kvatlas
try:
    import kvatlas.{room}
except kvatlas.AtlasError as error:
    print(error.code, isinstance(error, ImportError), error.hint)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "missing_extra True Try: pip install 'kvatlas[torch]'\n"


def test_memory_between_two_elements_is_refused() -> None:
    made = plan("Qwen3-8B", memory="64MiB", max_len=16)
    room = torch.zeros(made.pools[0].nbytes + 8, dtype=torch.uint8)
    for memory in (room[1:], memoryview(bytearray(room.numel()))[1:]):
        with pytest.raises(AtlasError) as refusal:
            bind(memory, made)
        assert refusal.value.code is Code.MISALIGNED
    assert bind(room[2:], made)[made.layers[0]].k.dtype == torch.bfloat16


def test_caches_of_layers_are_compared_by_who_they_are() -> None:
    made = plan("Qwen3-8B", memory="64MiB", max_len=16)
    one, two = (allocate(made)[made.layers[0]] for _ in range(2))
    assert one == one
    assert one != two
    assert len({one, two}) == 2
