"""Pools of SGLang, made by its own classes: described, filled by its own code, and moved.

Each row of `POOLS` makes a pool on a CPU. A request is written with the pool's own methods where
these run on a CPU, is routed into a plan of policy vllm or atlas, and back into other pages of a
second pool. Every element is compared on both ways.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvatlas import AtlasError, Code
from kvatlas.engines.sglang import describe_pool
from kvatlas.models import Model
from kvatlas.planning import Plan, plan
from kvatlas.specs import (
    FullAttention,
    GatedDeltaNet,
    LatentAttention,
    Mamba2,
    SlidingAttention,
    sparse_latent,
)
from tests.other_engines.engine_pools import Bytes, move
from tests.other_engines.imports import sglang
from tests.planning.models import model_of
from tests.planning.test_engine_memory import several, tables_of
from tests.planning.test_foreign_fields import seen

pools = sglang("mem_cache.memory_pool")
windows = sglang("mem_cache.swa_memory_pool")
unified = sglang("mem_cache.unified_memory_pool")
states = sglang("configs.mamba_utils")
parallel = sglang("runtime_context").get_parallel

COMMON: dict[str, Any] = {"device": "cpu", "enable_memory_saver": False}
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
HEADS, WIDTH = 4, 16
DENSE = several("dense", 3, FullAttention(heads=HEADS, head_dim=WIDTH))
WIDE = several("wide", 3, FullAttention(heads=HEADS, head_dim=24, v_dim=16))
WINDOW = SlidingAttention(heads=HEADS, head_dim=WIDTH, window=20)
SLIDING = several("sliding", 2, WINDOW, FullAttention(heads=HEADS, head_dim=WIDTH))
LATENT = several("latent", 3, LatentAttention(latent=64, rope=16))
SPARSE = model_of("sparse", *[sparse_latent()] * 2)
MAMBA = several("mamba", 3, Mamba2(heads=4, head_dim=8, groups=2, state_size=16))
DELTA = GatedDeltaNet(key_heads=2, value_heads=4, key_dim=16, value_dim=8, ssm_dtype="fp32")
HYBRID = several("hybrid", 2, DELTA, FullAttention(heads=HEADS, head_dim=WIDTH))
Values = dict[str, NDArray[Any]]


@contextmanager
def environment(**names: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@dataclass
class Row:
    """A kind of pool: its model, how to make it, and its page size."""

    model: Model
    make: Callable[[], Any]
    page: int = 16
    tokens: int = 40
    mamba: Callable[[Any], Any] | None = None


def heads(model: Model = DENSE, page: int = 16, **more: Any) -> Callable[[], Any]:
    spec: Any = model.layers[0].spec
    given = {"size": 8 * page, "page_size": page, "dtype": BF16, "head_num": spec.heads} | COMMON
    given |= {"head_dim": spec.head_dim, "v_head_dim": spec.v_dim, "layer_num": 3} | more
    return lambda: pools.MHATokenToKVPool(**given)


def hnd() -> Any:
    with environment(SGLANG_USE_HND_KVCACHE="1"):
        return heads()()


def latent(**more: Any) -> Any:
    given = {"size": 128, "page_size": 16, "dtype": BF16, "kv_lora_rank": 64} | COMMON
    return pools.MLATokenToKVPool(**given | {"qk_rope_head_dim": 16, "layer_num": 3} | more)


def sparse(dtype: Any, row: int) -> Callable[[], Any]:
    def make() -> Any:
        with parallel().override(attn_dcp_size=1):
            return pools.DSATokenToKVPool(
                size=256, page_size=64, dtype=dtype, kv_lora_rank=512, qk_rope_head_dim=64,
                layer_num=2, index_head_dim=128, kv_cache_dim=row, **COMMON,
            )  # fmt: skip

    return make


def swa() -> Any:
    return windows.SWAKVPool(
        size=192, size_swa=96, page_size=16, dtype=BF16, head_num=HEADS, head_dim=WIDTH,
        swa_attention_layer_ids=[0, 2], full_attention_layer_ids=[1, 3], device="cpu",
    )  # fmt: skip


def cache_params(model: Model, layers: list[int]) -> Any:
    """The shapes of states by SGLang's own formula."""
    spec: Any = model.layers[0].spec
    if isinstance(spec, GatedDeltaNet):
        sizes = {
            "intermediate_size": spec.value_heads * spec.value_dim,
            "n_groups": spec.key_heads,
            "num_heads": spec.value_heads,
            "head_dim": spec.value_dim,
            "state_size": spec.key_dim,
        }
    else:
        sizes = {
            "intermediate_size": spec.heads * spec.head_dim,
            "n_groups": spec.groups,
            "num_heads": spec.heads,
            "head_dim": spec.head_dim,
            "state_size": spec.state_size,
        }
    shape = states.Mamba2StateShape.create(tp_world_size=1, conv_kernel=spec.kernel, **sizes)
    ssm = torch.float32 if spec.ssm_dtype == "fp32" else BF16
    dtype = states.Mamba2StateDType(conv=BF16, temporal=ssm)
    return states.Mamba2CacheParams(shape=shape, dtype=dtype, layers=layers)


def mamba(model: Model = MAMBA, layers: tuple[int, ...] = (0, 1, 2), **more: Any) -> Any:
    return pools.MambaPool(
        size=8, spec_state_size=4, cache_params=cache_params(model, list(layers)),
        mamba_layer_ids=list(layers), device="cpu", **more,
    )  # fmt: skip


def hybrid() -> Any:
    return pools.HybridLinearKVPool(
        size=128, dtype=BF16, page_size=16, head_num=HEADS, head_dim=WIDTH,
        full_attention_layer_ids=[1, 3], device="cpu", mamba_pool=mamba(HYBRID, (0, 2)),
    )  # fmt: skip


def sub_pool(name: str, grow: str, layers: int) -> Any:
    return unified.MHASubPoolSpec(
        name=name, grow_direction=grow, layer_num=layers, head_num=HEADS, head_dim=WIDTH,
        store_dtype=BF16,
    )  # fmt: skip


def unified_windows() -> Any:
    buffer = unified.UnifiedKVPool(
        total_bytes=1 << 17, device="cpu", enable_memory_saver=False, page_size=16,
        sub_pool_specs=[sub_pool("full", "up", 2), sub_pool("swa", "down", 2)],
    )  # fmt: skip
    return unified.UnifiedSWAKVPool(
        unified_buffer=buffer, swa_attention_layer_ids=[0, 2], full_attention_layer_ids=[1, 3],
        page_size=16,
    )  # fmt: skip


def unified_states() -> Any:
    shape = cache_params(HYBRID, [0, 2]).shape
    state = unified.MambaSubPoolSpec(
        name="mamba", grow_direction="down", layer_num=2, conv_state_shapes=tuple(shape.conv),
        conv_dtype=BF16, temporal_state_shape=shape.temporal, temporal_dtype=torch.float32,
    )  # fmt: skip
    buffer = unified.UnifiedKVPool(
        total_bytes=1 << 17, device="cpu", enable_memory_saver=False, page_size=16,
        sub_pool_specs=[sub_pool("full", "up", 2), state],
    )  # fmt: skip
    attention = unified.UnifiedMHATokenToKVPool(
        unified_buffer=buffer, sub_pool_name="full", page_size=16
    )
    recurrent = unified.UnifiedMambaPool(
        unified_buffer=buffer, sub_pool_name="mamba", spec_state_size=4, mamba_layer_ids=[0, 2]
    )
    return unified.UnifiedHybridLinearKVPool(
        size=128, dtype=BF16, page_size=16, head_num=HEADS, head_dim=WIDTH,
        full_attention_layer_ids=[1, 3], device="cpu", mamba_pool=recurrent,
        full_kv_pool=attention,
    )  # fmt: skip


def vectorized() -> Any:
    """ROCm's layout: the class allocates it on every device, but selects it on ROCm only."""
    pool = heads()()
    pool.kv_cache_layout, pool._kv_vector_x = "vectorized_5d", 8
    pool._create_buffers_normal()
    return pool


ROWS: dict[str, Row] = {
    "nhd": Row(DENSE, heads()),
    "nhd, page 1": Row(DENSE, heads(page=1, size=128), page=1),
    "nhd, rows after the last page": Row(DENSE, heads(size=137)),
    "nhd, two widths": Row(WIDE, heads(WIDE)),
    "nhd, fp8": Row(DENSE.with_cache("fp8"), heads(dtype=FP8)),
    "hnd": Row(DENSE, hnd),
    "vectorized_5d": Row(DENSE, vectorized),
    "mla": Row(LATENT, latent),
    "mla, fp8": Row(LATENT.with_cache("fp8"), lambda: latent(dtype=FP8)),
    "dsa": Row(SPARSE, sparse(BF16, 576), page=64, tokens=150),
    "dsa, fp8": Row(SPARSE.with_cache("fp8_ds_mla"), sparse(FP8, 656), page=64, tokens=150),
    "swa": Row(SLIDING, swa),
    "mamba": Row(MAMBA, mamba),
    "mamba, one entry per slot": Row(MAMBA, lambda: mamba(envelope_layout=True)),
    "hybrid": Row(HYBRID, hybrid),
    "unified, windows": Row(SLIDING, unified_windows),
    "unified, states": Row(HYBRID, unified_states),
}  # fmt: skip


# -- SGLang's own code reads and writes -----------------------------------------------------------


def parts_of(pool: Any) -> Iterator[tuple[int, Any, int, str]]:
    """(decoder layer, pool, place in the pool, kind) of each cache, by SGLang's own tables."""
    name = type(pool).__name__
    if "SWA" in name:
        for index, (place, _) in pool.layers_mapping.items():
            part = pool.swa_kv_pool if pool.layers_mapping[index][1] else pool.full_kv_pool
            yield index, part, place, "window" if pool.layers_mapping[index][1] else "heads"
        return
    if "Hybrid" in name:
        for index, place in pool.full_attention_layer_id_mapping.items():
            yield index, pool.full_kv_pool, place, "heads"
        yield from parts_of(pool.mamba_pool)
        return
    if "Mamba" in name:
        for place, index in enumerate(pool.mamba_layer_ids):
            yield index, pool, place, "states"
        return
    for place in range(pool.layer_num):
        yield place, pool, place, "rows" if hasattr(pool, "kv_buffer") else "heads"


def bits(tensor: Any) -> NDArray[Any]:
    """The elements of a tensor as unsigned integers."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    array: NDArray[Any] = tensor.contiguous().view(kinds[tensor.element_size()]).numpy()
    return array.view(f"u{tensor.element_size()}")


def write(part: Any, place: int, kind: str, slots: Any, rng: Any) -> Values:
    """Write random values into slots with SGLang's methods. Returns them, by field."""
    torch_rng = torch.Generator().manual_seed(int(rng.integers(1 << 30)))

    def some(*shape: int, dtype: Any) -> Any:
        return torch.randn(*shape, generator=torch_rng).to(dtype)

    count, layer = len(slots), SimpleNamespace(layer_id=place)
    loc = torch.tensor(slots)
    if kind == "states":
        conv, ssm = part.mamba_cache.conv[0][place], part.mamba_cache.temporal[place]
        for own in (conv, ssm):
            own[loc] = some(count, *own.shape[1:], dtype=own.dtype)
        return {"conv": bits(conv[loc]), "ssm": bits(ssm[loc])}
    if kind == "rows":
        if part.dsa_kv_cache_store_fp8:
            rows = torch.randint(0, 255, (count, 1, 656), generator=torch_rng, dtype=torch.uint8)
            part.kv_buffer[place][loc] = rows  # the kernel that quantises needs a GPU
            found = rows[:, 0]
            content = {
                "latent": found[:, :512],
                "latent_scale": found[:, 512:528].view(torch.int32),
                "rope": found[:, 528:].view(torch.int16),
            }
        else:
            dtype, whole = part.dtype, part.kv_lora_rank
            rows = some(count, 1, whole + part.qk_rope_head_dim, dtype=dtype)
            with parallel().override(dcp_enabled=False):
                part.set_kv_buffer(layer, loc, rows, None)
            content = {"latent": rows[:, 0, :whole], "rope": rows[:, 0, whole:]}
        return {name: bits(one) for name, one in content.items()}
    shape = (count, part.head_num)
    k, v = (some(*shape, n, dtype=part.dtype) for n in (part.head_dim, part.v_head_dim))
    if part.kv_cache_layout == "vectorized_5d":  # the kernel that writes it needs a GPU
        pages, offsets, x = loc // part.page_size, loc % part.page_size, part._kv_vector_x
        part.k_buffer[place][pages, :, :, offsets] = k.view(*shape, -1, x)
        part.v_buffer[place][pages, :, offsets // x, :, offsets % x] = v
    else:
        part.set_kv_buffer(layer, pools.KVWriteLoc(loc, physical=True), k, v)
    return {"k": bits(k), "v": bits(v)}


def read(part: Any, place: int, kind: str, slots: Any) -> Values:
    """Read slots with SGLang's getters."""
    loc = torch.tensor(slots)
    if kind == "states":
        held = part.mamba2_layer_cache(place)
        return {"conv": bits(held.conv[0][loc]), "ssm": bits(held.temporal[loc])}
    if kind == "rows":
        rows = part.kv_buffer[place][loc][:, 0]
        if part.dsa_kv_cache_store_fp8:
            return {
                "latent": bits(rows[:, :512]),
                "latent_scale": bits(rows[:, 512:528].view(torch.int32)),
                "rope": bits(rows[:, 528:].view(torch.int16)),
            }
        whole = part.kv_lora_rank
        return {"latent": bits(rows[:, :whole]), "rope": bits(rows[:, whole:])}
    k, v = part.get_key_buffer(place), part.get_value_buffer(place)
    pages, offsets = loc // part.page_size, loc % part.page_size
    if part.kv_cache_layout == "hnd":
        return {"k": bits(k[pages, :, offsets]), "v": bits(v[pages, :, offsets])}
    if part.kv_cache_layout == "vectorized_5d":
        x = part._kv_vector_x
        return {
            "k": bits(k[pages, :, :, offsets].flatten(2)),
            "v": bits(v[pages, :, offsets // x, :, offsets % x]),
        }
    return {"k": bits(k[loc]), "v": bits(v[loc])}


def index_keys(part: Any, place: int, slots: Any, rng: Any = None) -> Values:
    """Index keys and scales of slots: a page has all keys, then all scales."""
    buffer = part.index_k_with_scale_buffer[place].numpy()
    page = part.page_size
    keys = buffer[:, : page * 128].reshape(-1, page, 128)
    scales = buffer[:, page * 128 :].view("u4").reshape(-1, page, 1)
    where = np.asarray(slots) // page, np.asarray(slots) % page
    if rng is not None:
        keys[where] = rng.integers(1, 250, (len(slots), 128))
        scales[where] = rng.integers(1, 1 << 30, (len(slots), 1))
    return {"index": keys[where], "index_scale": scales[where]}


def slots_of(made: Plan, layer: str, tables: Any, tokens: int) -> list[int]:
    """Slots of a request's tokens that a layer still sees, or the slot of its state."""
    group = made.region_of(layer)[0].group
    blocks = tables[group]
    if made.groups[group].kind == "recurrent":
        return list(blocks)
    size, first = made.groups[group].block, made.groups[group].visibility.first(tokens)
    return [blocks[t // size] * size + t % size for t in range(first, tokens)]


def caches(pool: Any, model: Model) -> Iterator[tuple[str, Any, int, str]]:
    """(layer of kvatlas, pool, place, kind) of each cache."""
    for index, part, place, kind in parts_of(pool):
        for layer in model.layers:
            if layer.index == index and not layer.name.endswith("indexer"):
                yield layer.name, part, place, kind
            elif layer.index == index:
                yield layer.name, part, place, "keys"


def stored(made: Plan, memory: list[Bytes], layer: str, tables: Any, tokens: int) -> Values:
    """The values of a request in a plan of kvatlas, by field."""
    found = {}
    group = made.region_of(layer)[0].group
    for one in made.page(layer).fields:
        if one.padding:
            continue
        pool = memory[made.groups[group].pool]
        item = f"u{one.dtype.item}"
        if made.groups[group].kind == "recurrent":
            axes = "RT" if one.name == "conv" else [axis.name for axis in one.axes]
            view = made.view(layer, one.name).reorder("B", *axes).view(pool)
            found[one.name] = view.view(item)[tables[group], ..., 0]
            continue
        logical = seen(made, pool, layer, one.name, item).logical[tables[group]]
        first = made.groups[group].visibility.first(tokens)
        found[one.name] = logical.reshape(-1, *logical.shape[2:])[first:tokens]
    return found


def blocks_of(pool: Any, made: Plan, tokens: int, first: int) -> dict[int, list[int]]:
    """Blocks of a request. Tables of a unified buffer share its bytes: they begin at both ends."""
    tables = tables_of(made, tokens, first=first)
    if type(pool).__name__.startswith("Unified"):
        tables[1] = [block + 8 if block else 0 for block in tables[1]]
    return tables


@pytest.mark.parametrize("policy", ["vllm", "atlas"])
@pytest.mark.parametrize("name", ROWS)
def test_every_element_moves_there_and_back(name: str, policy: Any) -> None:
    row, rng = ROWS[name], np.random.default_rng(5)
    pool = row.make()
    longest = 4 * max(row.page, 16)
    memory = describe_pool(row.model, pool, max_len=longest)
    made = memory.plan
    assert made.block_size == row.page or made.groups[0].kind == "recurrent"
    ours = plan(row.model, memory="64MiB", policy=policy, max_len=longest)
    own = [rng.integers(0, 256, one.nbytes, dtype=np.uint8) for one in ours.pools]
    tables = blocks_of(pool, made, row.tokens, 1), tables_of(ours, row.tokens, first=2)
    written = {}
    for layer, part, place, kind in caches(pool, row.model):
        slots = slots_of(made, layer, tables[0], row.tokens)
        if kind == "keys":
            written[layer] = index_keys(part, place, slots, rng)
        else:
            written[layer] = write(part, place, kind, slots, rng)
    moved, runs = move(memory, (ours, own), tables, row.tokens)
    compared = 0
    for layer, wanted in written.items():
        found = stored(ours, own, layer, tables[1], row.tokens)
        assert found.keys() == wanted.keys()
        for field, values in wanted.items():
            assert np.array_equal(found[field].ravel(), values.ravel()), (layer, field)
            compared += values.size
    assert min(compared, moved) > 1000
    assert runs
    again = row.make()
    other = describe_pool(row.model, again, max_len=longest)
    assert other.plan == made
    back = blocks_of(pool, made, row.tokens, 2)
    move((ours, own), other, (tables[1], back), row.tokens)
    for layer, part, place, kind in caches(again, row.model):
        slots = slots_of(made, layer, back, row.tokens)
        found = index_keys(part, place, slots) if kind == "keys" else read(part, place, kind, slots)
        for field, values in written[layer].items():
            assert np.array_equal(found[field].ravel(), values.ravel()), (layer, field)


def test_unknown_versions_and_pools_are_refused() -> None:
    pool = heads()()
    fp4 = pools.MHATokenToKVPoolFP4(
        size=128, page_size=16, dtype=BF16, head_num=HEADS, head_dim=WIDTH, layer_num=3, **COMMON
    )
    half = heads(dtype=torch.float16)()
    wrong: list[tuple[Any, dict[str, Any], Code]] = [
        (pool, {"version": "0.4.0"}, Code.ENGINE_REFUSES),
        (fp4, {}, Code.ENGINE_REFUSES),
        (object(), {}, Code.ENGINE_REFUSES),
        (half, {}, Code.BAD_TENSOR),
        (pool, {"tp": 2}, Code.BAD_TENSOR),
        (heads(layer_num=5)(), {}, Code.ENGINE_REFUSES),
    ]
    for given, more, code in wrong:
        with pytest.raises(AtlasError) as refusal:
            describe_pool(DENSE, given, max_len=64, **more)
        assert refusal.value.code is code, refusal.value
