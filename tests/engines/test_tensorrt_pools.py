"""TensorRT-LLM's pools, from shapes and strides that its source specifies: described and moved.

TensorRT-LLM cannot be installed without CUDA, so no class of it runs here. The arrays are those of
`_torch/disaggregation/resource/kv_extractor.py` (V1: `build_page_table`) and of
`runtime/kv_cache_manager_v2/_storage/_config.py` (V2: `create_storage_config`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvatlas import AtlasError, Code
from kvatlas.engines.engine_memory import EngineMemory
from kvatlas.engines.tensorrt_llm import SlotPool, describe_pools, describe_slots
from kvatlas.planning import plan
from tests.other_engines.engine_pools import move
from tests.planning.test_engine_memory import (
    DENSE,
    HEADS,
    LATENT,
    PAGE,
    PAGES,
    SLIDING,
    WIDTH,
    several,
    states,
    tables_of,
)
from tests.planning.test_foreign_fields import Tensor, seen

BLOCK = HEADS * PAGE * WIDTH
FP8 = DENSE.with_cache("fp8")


class Made(NamedTuple):
    model: Any
    memory: EngineMemory
    tensors: dict[str, dict[str, Tensor]]
    """The fields of each layer, divided by the test's own slices."""


def random(*shape: int, dtype: str = "u2") -> Any:
    return np.random.default_rng(len(shape)).integers(1, 250, shape).astype(dtype)


def sides(model: Any, blocks: Callable[[int], Any], order: str = "HN") -> Any:
    """K and V of each layer; `blocks` returns (blocks, 2, elements) of a layer."""
    found = {}
    shape = (HEADS, PAGE, WIDTH) if order == "HN" else (PAGE, HEADS, WIDTH)
    for n, layer in enumerate(model.layers):
        own = blocks(n)
        each = own.reshape(len(own), 2, *shape)
        assert np.shares_memory(each, own)
        found[layer.name] = {
            side: Tensor(each[:, at], f"B{order}C") for at, side in enumerate("kv")
        }
    return found


def v1() -> Made:
    pool = random(PAGES, 3, 2, BLOCK)
    memory = describe_pools(DENSE, [pool], tokens_per_block=PAGE, dtype="bf16", max_len=64)
    return Made(DENSE, memory, sides(DENSE, lambda n: pool[:, n]))


def v1_nhd() -> Made:
    pool = random(PAGES, 3, 2, BLOCK)
    options: dict[str, Any] = {"tokens_per_block": PAGE, "dtype": "bf16", "order": "NHD"}
    memory = describe_pools(DENSE, [pool], max_len=64, **options)
    return Made(DENSE, memory, sides(DENSE, lambda n: pool[:, n], "NH"))


def v1_fp8() -> Made:
    pool = random(PAGES, 3, 2, BLOCK, dtype="u1")
    memory = describe_pools(DENSE, [pool], tokens_per_block=PAGE, dtype="fp8", max_len=64)
    return Made(FP8, memory, sides(DENSE, lambda n: pool[:, n]))


def v1_windows() -> Made:
    """One pool for each window, with its own number of blocks."""
    small, large = random(7, 2, 2, BLOCK), random(12, 2, 2, BLOCK)
    memory = describe_pools(
        SLIDING, [small, large], tokens_per_block=PAGE, dtype="bf16", max_len=64,
        layers=[[0, 2], [1, 3]], windows=[20, None],
    )  # fmt: skip
    return Made(SLIDING, memory, sides(SLIDING, lambda n: (small, large)[n % 2][:, n // 2]))


def v1_latent() -> Made:
    pool = random(PAGES, 3, 1, PAGE * 80)
    memory = describe_pools(LATENT, [pool], tokens_per_block=PAGE, dtype="bf16", max_len=64)
    rows = pool.reshape(PAGES, 3, PAGE, 80)
    found = {
        layer.name: {
            "latent": Tensor(rows[:, n, :, :64], "BNC"), "rope": Tensor(rows[:, n, :, 64:], "BNC")
        }
        for n, layer in enumerate(LATENT.layers)
    }  # fmt: skip
    return Made(LATENT, memory, found)


def v2() -> Made:
    """SlotPool of six buffers, with unused bytes after each slot."""
    slots = random(PAGES, 6 * BLOCK * 2 + 64, dtype="u1")[:, : 6 * BLOCK * 2]
    buffers = [(n, role) for n in range(3) for role in ("key", "value")]
    pools = [SlotPool(slots, buffers, tokens_per_block=PAGE)]
    memory = describe_slots(DENSE, pools, dtype="bf16", max_len=64)
    elements = np.lib.stride_tricks.as_strided(
        slots.base.view("u2"), (PAGES, 3, 2, BLOCK), (slots.strides[0], 4 * BLOCK, 2 * BLOCK, 2)
    )
    return Made(DENSE, memory, sides(DENSE, lambda n: elements[:, n]))


def v2_life_cycles() -> Made:
    """Pools of two life cycles; values come before keys in one of them."""
    window, full = random(7, 4 * BLOCK), random(12, 4 * BLOCK)
    memory = describe_slots(
        SLIDING, dtype="bf16", max_len=64, pools=[
            SlotPool(window, [(0, "key"), (2, "key"), (0, "value"), (2, "value")], PAGE, window=20),
            SlotPool(full, [(1, "key"), (1, "value"), (3, "key"), (3, "value")], PAGE),
        ],
    )  # fmt: skip

    def blocks(n: int) -> Any:
        if n % 2:
            return full.reshape(12, 2, 2, BLOCK)[:, n // 2]
        return window.reshape(7, 2, 2, BLOCK)[:, :, n // 2]

    return Made(SLIDING, memory, sides(SLIDING, blocks))


@pytest.mark.parametrize("policy", ["vllm", "atlas"])
@pytest.mark.parametrize(
    "make", [v1, v1_nhd, v1_fp8, v1_windows, v1_latent, v2, v2_life_cycles],
    ids=lambda one: one.__name__,
)  # fmt: skip
def test_every_element_moves_there_and_back(make: Callable[[], Made], policy: Any) -> None:
    here, tokens = make(), 40
    made = here.memory.plan
    ours = plan(here.model, memory="1MiB", policy=policy, max_len=64)
    own = [np.zeros(one.nbytes, np.uint8) for one in ours.pools]
    tables = tables_of(made, tokens, first=1), tables_of(ours, tokens, first=2)
    move(here.memory, (ours, own), tables, tokens)
    compared = 0
    for layer, fields in here.tensors.items():
        for name, tensor in fields.items():
            wanted = states(made, layer, tensor, tables[0], tokens)
            pool = own[ours.groups[ours.region_of(layer)[0].group].pool]
            other = seen(ours, pool, layer, name, tensor.array.dtype.str)
            found = states(ours, layer, other, tables[1], tokens)
            assert np.array_equal(found.ravel(), wanted.ravel()), (layer, name)
            compared += wanted.size
    assert compared > 1000
    there, back = make(), tables_of(made, tokens, first=2)
    for fields in there.tensors.values():
        for tensor in fields.values():
            tensor.array[...] = 0
    move((ours, own), there.memory, (tables[1], back), tokens)
    for layer, fields in there.tensors.items():
        for name, tensor in fields.items():
            wanted = states(made, layer, here.tensors[layer][name], tables[0], tokens)
            found = states(made, layer, tensor, back, tokens)
            assert np.array_equal(found, wanted), (layer, name)
            assert np.count_nonzero(tensor.array) == np.count_nonzero(wanted)


def test_wrong_pools_are_refused() -> None:
    pool, slots = random(PAGES, 3, 2, BLOCK), random(PAGES, 6 * BLOCK)
    given: dict[str, Any] = {"tokens_per_block": PAGE, "dtype": "bf16", "max_len": 64}
    buffers = [(n, role) for n in range(3) for role in ("key", "value")]
    wrong: list[tuple[Callable[[], Any], Code]] = [
        (lambda: describe_pools(DENSE, [pool], **given | {"version": "0.9"}), Code.ENGINE_REFUSES),
        (lambda: describe_pools(DENSE, [pool], **given | {"dtype": "fp16"}), Code.BAD_TENSOR),
        (lambda: describe_pools(DENSE, [pool, pool], **given), Code.BAD_TENSOR),
        (lambda: describe_pools(DENSE, [pool], tp=2, **given), Code.BAD_TENSOR),
        (lambda: describe_pools(DENSE, [pool[..., 1:]], **given), Code.BAD_TENSOR),
        (lambda: describe_pools(several("other", 9, DENSE.layers[0].spec), [pool], **given),
         Code.OUT_OF_RANGE),
        (lambda: describe_slots(DENSE, [SlotPool(slots[:, 1:], buffers, PAGE)], dtype="bf16"),
         Code.BAD_TENSOR),
        (lambda: describe_slots(DENSE, [SlotPool(slots, [(0, "scale")], PAGE)], dtype="bf16"),
         Code.ENGINE_REFUSES),
    ]  # fmt: skip
    for call, code in wrong:
        with pytest.raises(AtlasError) as refusal:
            call()
        assert refusal.value.code is code, refusal.value
