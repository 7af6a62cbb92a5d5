"""Each memory layout of other engines: described, routed both ways, and every element compared.

`ROWS` lists the layouts by engine. Arrays are laid out by numpy alone, and the bytes of a request
are compared with these arrays, after a copy along a route into a plan of policy vllm or atlas.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from kvatlas import AtlasError, Code, Placement
from kvatlas.models import Model
from kvatlas.planning import Plan, foreign, from_exchange, plan, to_exchange
from kvatlas.routing import route
from kvatlas.specs import (
    FullAttention,
    LatentAttention,
    Mamba2,
    SlidingAttention,
    Spec,
    compressed_latent,
    sparse_latent,
)
from tests.planning.models import model_of
from tests.planning.test_foreign_fields import (
    LAYOUTS,
    Arena,
    Tensor,
    Tensors,
    names,
    pairs,
    seen,
)

PAGES, PAGE, HEADS, WIDTH = 9, 16, 4, 16
Bytes = NDArray[np.uint8]


@dataclass
class Engine:
    """An engine's memory: arrays with named axes, and the pool of each layer."""

    model: Model
    tensors: Tensors
    memory: list[Bytes]
    """The bytes of each pool. Two pools may be the same memory."""
    page: int = PAGE
    pool_of: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    length: int | None = None

    @property
    def tokens(self) -> int:
        return self.length or 2 * self.page + self.page // 2

    @property
    def max_len(self) -> int:
        return 4 * max(self.page, PAGE)

    def described(self, tensors: Tensors | None = None) -> Plan:
        layers = {
            layer: {name: Placement.from_tensor(*one) for name, one in fields.items()}
            for layer, fields in (tensors or self.tensors).items()
        }
        return foreign(self.model, layers, max_len=self.max_len, **self.options)


def several(name: str, layers: int, *specs: Spec) -> Model:
    """A model that repeats these layers."""
    each: list[dict[str, Spec]] = [{"attn": spec} for spec in specs]
    return model_of(name, *each * layers)


def dense(layers: int = 3, **spec: Any) -> Model:
    return several("dense", layers, FullAttention(heads=HEADS, **({"head_dim": WIDTH} | spec)))


DENSE = dense()
WINDOW: Spec = SlidingAttention(heads=HEADS, head_dim=WIDTH, window=20)
SLIDING = several("sliding", 2, WINDOW, FullAttention(heads=HEADS, head_dim=WIDTH))
LATENT = several("latent", 3, LatentAttention(latent=64, rope=16))
ROWS_656 = several("rows", 2, LatentAttention(latent=512, cache="fp8_ds_mla"))
SPARSE = model_of("sparse", *[sparse_latent()] * 2)
COMPRESSED = model_of("compressed", compressed_latent(0), compressed_latent(4))
NVFP4 = dense(2, head_dim=128, cache="nvfp4")
MAMBA = several("mamba", 3, Mamba2(heads=4, head_dim=8, groups=2, state_size=6))


def of_pairs(model: Model, arena: Arena, arrays: Any, axes: str, **more: Any) -> Engine:
    return Engine(model, pairs(model, arrays, axes), [arena.bytes], **more)


# -- SGLang, device -------------------------------------------------------------------------------


def sglang_slots(arena: Arena) -> Engine:
    """NHD with page size 1: (2, slots, H, D) for each layer, and slot 0 is reserved."""
    made = [arena.take((2, 64, 1, HEADS, WIDTH)) for _ in DENSE.layers]
    return of_pairs(DENSE, arena, lambda n: tuple(made[n]), "BNHC", page=1, length=40)


def sglang_two_widths(arena: Arena) -> Engine:
    """K and V of different widths, in two tensors."""
    model = dense(head_dim=24, v_dim=16)
    made = [
        (arena.take((PAGES, PAGE, HEADS, 24)), arena.take((PAGES, PAGE, HEADS, 16)))
        for _ in model.layers
    ]
    return of_pairs(model, arena, lambda n: made[n], "BNHC")


def sglang_fp8(arena: Arena) -> Engine:
    """Fp8 elements, stored as uint8."""
    model = dense(cache="fp8")
    made = [arena.take((2, PAGES, PAGE, HEADS, WIDTH), "u1") for _ in model.layers]
    return of_pairs(model, arena, lambda n: tuple(made[n]), "BNHC")


def sglang_mla(arena: Arena) -> Engine:
    """Rows of latent and rope for each layer: (slots, 1, width)."""
    found: Tensors = {}
    for name in names(LATENT):
        rows = arena.take((PAGES, PAGE, 80))
        found[name] = {
            "latent": Tensor(rows[..., :64], "BNC"),
            "rope": Tensor(rows[..., 64:], "BNC"),
        }
    return Engine(LATENT, found, [arena.bytes])


def rows_of_656(rows: NDArray[Any]) -> dict[str, Tensor]:
    """Latent, its scales and rope in 656 bytes per token."""
    return {
        "latent": Tensor(rows[..., :512], "BNC"),
        "latent_scale": Tensor(rows[..., 512:528].view("u4"), "BNC"),
        "rope": Tensor(rows[..., 528:].view("u2"), "BNC"),
    }


def sglang_dsa(arena: Arena) -> Engine:
    """656 bytes per token as uint8, in pages of 64 tokens."""
    found = {name: rows_of_656(arena.take((6, 64, 656), "u1")) for name in names(ROWS_656)}
    return Engine(ROWS_656, found, [arena.bytes], page=64)


def sglang_index_keys(arena: Arena) -> Engine:
    """(pages, 64 * 132) bytes next to the rows: the keys of a page, then their scales."""
    found: Tensors = {}
    for layer in SPARSE.layers:
        if not layer.name.endswith("indexer"):
            rows = arena.take((6, 64, 576))
            parts = {"latent": rows[..., :512], "rope": rows[..., 512:]}
            found[layer.name] = {part: Tensor(array, "BNC") for part, array in parts.items()}
            continue
        pages = arena.take((6, 64 * 132), "u1")
        keys, scales = pages[:, : 64 * 128], pages[:, 64 * 128 :].view("u4")
        found[layer.name] = {
            "index": Tensor(keys.reshape(6, 64, 128), "BNC"),
            "index_scale": Tensor(scales.reshape(6, 64, 1), "BNC"),
        }
    return Engine(SPARSE, found, [arena.bytes], page=64)


def sglang_fp4(arena: Arena) -> Engine:
    """Codes and flat scales of each slot in separate tensors for each layer."""
    found: Tensors = {}
    for name in names(NVFP4):
        codes = arena.take((2, PAGES, PAGE, HEADS, 64), "u1")
        scales = arena.take((2, PAGES, PAGE, HEADS, 8), "u1")
        found[name] = {
            f"{side}{suffix}": Tensor(array[n], "BNHC")
            for n, side in enumerate("kv")
            for suffix, array in (("", codes), ("_scale", scales))
        }
    return Engine(NVFP4, found, [arena.bytes])


def sglang_interleaved_scales(arena: Arena) -> Engine:
    """Pages of 128 tokens, whose scales are interleaved: 32 rows of 4 x 4 scales."""
    found: Tensors = {}
    for name in names(NVFP4):
        codes = arena.take((2, 5, 128, HEADS, 64), "u1")
        scales = arena.take((2, 5, HEADS, 2, 32, 4, 4), "u1")
        found[name] = {
            f"{side}{suffix}": Tensor(array[n], axes)
            for n, side in enumerate("kv")
            for suffix, array, axes in (("", codes, "BNHC"), ("_scale", scales, "BHCNkc"))
        }
    return Engine(NVFP4, found, [arena.bytes], page=128)


def sglang_mamba_transposed(arena: Arena) -> Engine:
    """conv (L, size + 1, K - 1, dim) and temporal (L, size + 1, HV, V, K); slot 0 is reserved."""
    width = MAMBA.layers[0].spec.page(1).field("conv").sizes["R"]
    conv, temporal = arena.take((3, PAGES, 3, width)), arena.take((3, PAGES, 4, 8, 6))
    found = {
        name: {"conv": Tensor(conv[n], "BTR"), "ssm": Tensor(temporal[n], "BHPS")}
        for n, name in enumerate(names(MAMBA))
    }
    return Engine(MAMBA, found, [arena.bytes])


def sglang_sliding(arena: Arena) -> Engine:
    """A second pool for windows, with slots of its own and fewer of them."""
    other, found = Arena(), {}
    for layer in SLIDING.layers:
        window = isinstance(layer.spec, SlidingAttention)
        made = (other if window else arena).take((2, 7 if window else 12, PAGE, HEADS, WIDTH))
        found[layer.name] = {side: Tensor(made[n], "BNHC") for n, side in enumerate("kv")}
    homes = {layer.name: 0 if layer.index % 2 == 0 else 1 for layer in SLIDING.layers}
    return Engine(SLIDING, found, [other.bytes, arena.bytes], pool_of=homes)


def sglang_unified_memory(arena: Arena) -> Engine:
    """One buffer of token-major entries [K0 V0 K1 V1 ...], used from both ends by two pools.

    Rows are aligned to 16 bytes and entries to 32. Block ids are physical: the tables of virtual
    slots are applied before.
    """
    buffer = arena.take((1 << 15,), "u1")
    model = model_of(
        "unified",
        {"attn": SlidingAttention(heads=1, head_dim=4, window=20)},
        {"attn": FullAttention(heads=1, head_dim=4)},
        {"attn": FullAttention(heads=1, head_dim=4)},
    )
    found: Tensors = {}
    for layers in (["layers.0.attn"], ["layers.1.attn", "layers.2.attn"]):
        entry = len(layers) * 32  # K and V of a layer, 8 of 16 bytes each
        slots = len(buffer) // entry // PAGE * PAGE
        rows = buffer[: slots * entry].reshape(-1, PAGE, len(layers), 2, 16)[..., :8].view("u2")
        for n, name in enumerate(layers):
            sides = (Tensor(rows[:, :, n, side], "BNC") for side in range(2))
            found[name] = dict(zip("kv", sides, strict=True))
    homes = {"layers.0.attn": 0, "layers.1.attn": 1, "layers.2.attn": 1}
    return Engine(model, found, [arena.bytes, arena.bytes], pool_of=homes)


def sglang_deepseek_v4(arena: Arena) -> Engine:
    """Pages of 584 bytes per token: rows of latent and rope, then scales, padded to 576 bytes.

    Each cache of a layer is in a separate tensor: windows, compressed rows, index keys and states.
    The states of a page are a ring of the last 8 tokens, so requests end where a page ends.
    """
    found: Tensors = {}
    for layer in COMPRESSED.layers:
        page = layer.spec.page(256)
        rows = page.states
        if layer.name.endswith("compressor"):
            width = page.field("state").sizes["C"]
            found[layer.name] = {"state": Tensor(arena.take((PAGES, 8, width), "u4"), "BNC")}
        elif layer.name.endswith("indexer"):
            pages = arena.take((4, rows * 132), "u1")
            keys, scales = pages[:, : rows * 128], pages[:, rows * 128 :].view("u4")
            found[layer.name] = {
                "index": Tensor(keys.reshape(4, rows, 128), "BNC"),
                "index_scale": Tensor(scales.reshape(4, rows, 1), "BNC"),
            }
        else:
            pages = arena.take((4, -(-rows * 584 // 576) * 576), "u1")
            data = pages[:, : rows * 576].reshape(4, rows, 576)
            scales = pages[:, rows * 576 : rows * 584].reshape(4, rows, 8)
            found[layer.name] = {
                "latent": Tensor(data[..., :448], "BNC"),
                "rope": Tensor(data[..., 448:].view("u2"), "BNC"),
                "latent_scale": Tensor(scales[..., :7], "BNC"),
            }
    groups: list[list[str]] = [[], [], []]
    for name in found:
        groups[2 if name.endswith("compressor") else 0 if name.endswith("swa") else 1].append(name)
    homes = {name: number for number, own in enumerate(groups) for name in own}
    return Engine(
        COMPRESSED, found, [arena.bytes] * 3, page=256, length=512, pool_of=homes,
        options={"groups": groups, "pools": [0, 1, 2]},
    )  # fmt: skip


# -- SGLang, host ---------------------------------------------------------------------------------


def sglang_layer_first(arena: Arena) -> Engine:
    made = arena.take((2, 3, PAGES, PAGE, HEADS, WIDTH))
    return of_pairs(DENSE, arena, lambda n: (made[0, n], made[1, n]), "BNHC")


def sglang_page_first(arena: Arena) -> Engine:
    made = arena.take((2, PAGES, PAGE, 3, HEADS, WIDTH))
    return of_pairs(DENSE, arena, lambda n: (made[0, :, :, n], made[1, :, :, n]), "BNHC")


def sglang_page_first_direct(arena: Arena) -> Engine:
    made = arena.take((2, PAGES, 3, PAGE, HEADS, WIDTH))
    return of_pairs(DENSE, arena, lambda n: (made[0, :, n], made[1, :, n]), "BNHC")


# -- LMCache --------------------------------------------------------------------------------------

CHUNK = 32


def lmcache_kv_2ltd(arena: Arena) -> Engine:
    """Chunks [2, L, T, H * D], one after another in pinned memory."""
    made = arena.take((PAGES, 2, 3, CHUNK, HEADS, WIDTH))
    return of_pairs(DENSE, arena, lambda n: (made[:, 0, n], made[:, 1, n]), "BNHC", page=CHUNK)


def lmcache_kv_t2d(arena: Arena) -> Engine:
    """Chunks [T, 2, H * D] of each layer."""
    made = [arena.take((PAGES, CHUNK, 2, HEADS, WIDTH)) for _ in DENSE.layers]
    return of_pairs(
        DENSE, arena, lambda n: (made[n][:, :, 0], made[n][:, :, 1]), "BNHC", page=CHUNK
    )


def lmcache_kv_2td(arena: Arena) -> Engine:
    """Chunks [2, T, H * D] of each layer."""
    made = [arena.take((PAGES, 2, CHUNK, HEADS, WIDTH)) for _ in DENSE.layers]
    return of_pairs(DENSE, arena, lambda n: (made[n][:, 0], made[n][:, 1]), "BNHC", page=CHUNK)


def lmcache_kv_mla(arena: Arena) -> Engine:
    """Chunks [1, L, T, D]."""
    made = arena.take((PAGES, 1, 3, CHUNK, 80))
    found = {
        name: {
            "latent": Tensor(made[:, 0, n, :, :64], "BNC"),
            "rope": Tensor(made[:, 0, n, :, 64:], "BNC"),
        }
        for n, name in enumerate(names(LATENT))
    }
    return Engine(LATENT, found, [arena.bytes], page=CHUNK)


# -- TensorRT-LLM ---------------------------------------------------------------------------------


def tensorrt_v1(arena: Arena) -> Engine:
    """(blocks, layers, 2, H * N * D), with heads outside of tokens."""
    made = arena.take((PAGES, 3, 2, HEADS, PAGE, WIDTH))
    return of_pairs(DENSE, arena, lambda n: (made[:, n, 0], made[:, n, 1]), "BHNC")


def tensorrt_v1_windows(arena: Arena) -> Engine:
    """One pool per window group, each with its own number of blocks."""
    other, found = Arena(), {}
    pools = other.take((7, 2, 2, HEADS, PAGE, WIDTH)), arena.take((12, 2, 2, HEADS, PAGE, WIDTH))
    for layer in SLIDING.layers:
        made = pools[layer.index % 2][:, layer.index // 2]
        found[layer.name] = {side: Tensor(made[:, n], "BHNC") for n, side in enumerate("kv")}
    homes = {layer.name: layer.index % 2 for layer in SLIDING.layers}
    return Engine(SLIDING, found, [other.bytes, arena.bytes], pool_of=homes)


def tensorrt_v2_override(arena: Arena) -> Engine:
    """Slots of equal buffers [buf0 buf1 ...]; a life cycle with other tokens per block."""
    other, found = Arena(), {}
    small = arena.take((PAGES, 2, 2, HEADS, PAGE, WIDTH))
    large = other.take((PAGES - 2, 2, HEADS, 2 * PAGE, WIDTH))
    for n, name in enumerate(names(DENSE)):
        k, v = (large[:, 0], large[:, 1]) if n == 2 else (small[:, n, 0], small[:, n, 1])
        found[name] = {"k": Tensor(k, "BHNC"), "v": Tensor(v, "BHNC")}
    homes = {name: int(n == 2) for n, name in enumerate(names(DENSE))}
    return Engine(DENSE, found, [arena.bytes, other.bytes], pool_of=homes)


def tensorrt_v2_states(arena: Arena) -> Engine:
    """Pools of conv and ssm states with slot strides: all layers of a slot, padded."""
    width = MAMBA.layers[0].spec.page(1).field("conv").sizes["R"]
    conv = arena.take((PAGES, 3 * width * 3 + 40))[:, : 3 * width * 3].reshape(PAGES, 3, width, 3)
    ssm = arena.take((PAGES, 3 * 192 + 16))[:, : 3 * 192].reshape(PAGES, 3, 4, 8, 6)
    found = {
        name: {"conv": Tensor(conv[:, n], "BRT"), "ssm": Tensor(ssm[:, n], "BHPS")}
        for n, name in enumerate(names(MAMBA))
    }
    return Engine(MAMBA, found, [arena.bytes])


# -- others ---------------------------------------------------------------------------------------


def flexkv_layer_first(arena: Arena) -> Engine:
    made = [arena.take((2, PAGES, PAGE, HEADS, WIDTH)) for _ in DENSE.layers]
    return of_pairs(DENSE, arena, lambda n: tuple(made[n]), "BNHC")


def flexkv_layer_block(arena: Arena) -> Engine:
    made = [arena.take((PAGES, 2, PAGE, HEADS, WIDTH)) for _ in DENSE.layers]
    return of_pairs(DENSE, arena, lambda n: (made[n][:, 0], made[n][:, 1]), "BNHC")


def of_fields(name: str) -> Callable[[Arena], Engine]:
    model, make = LAYOUTS[name]
    return lambda arena: Engine(model, make(arena), [arena.bytes])


ROWS: dict[str, Callable[[Arena], Engine]] = {
    **{name: of_fields(name) for name in LAYOUTS},
    **{
        make.__name__: make
        for make in (
            sglang_slots, sglang_two_widths, sglang_fp8, sglang_mla, sglang_dsa, sglang_index_keys,
            sglang_fp4, sglang_interleaved_scales, sglang_mamba_transposed, sglang_sliding,
            sglang_unified_memory, sglang_deepseek_v4, sglang_layer_first, sglang_page_first,
            sglang_page_first_direct, lmcache_kv_2ltd, lmcache_kv_t2d, lmcache_kv_2td,
            lmcache_kv_mla, tensorrt_v1, tensorrt_v1_windows, tensorrt_v2_override,
            tensorrt_v2_states, flexkv_layer_first, flexkv_layer_block,
        )
    },
}  # fmt: skip


class LargeArena(Arena):
    """Room for pages of DeepSeek's models."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = np.random.default_rng(8).integers(0, 256, 1 << 22, dtype=np.uint8)


def made_of(row: str) -> Engine:
    return ROWS[row](LargeArena())


def tables_of(made: Plan, tokens: int, *, first: int) -> dict[int, list[int]]:
    """Block ids for a request, in descending order, from id `first` of each pool on.

    Page 0 takes the writes of padded requests, so it is only where no block is needed.
    """
    taken: dict[int, int] = {}
    found = {}
    for number, group in enumerate(made.groups):
        entries = 1 if group.kind == "recurrent" else -(-tokens // group.block)
        outside = group.visibility.first(tokens) // group.block if entries > 1 else 0
        begin = taken.get(group.pool, first)
        taken[group.pool] = stop = begin + entries - outside
        found[number] = [0] * outside + list(range(begin, stop))[::-1]
    return found


def carry(source: Plan, destination: Plan, tables: Any, tokens: int, pools: Any) -> None:
    bound = route(source, destination).bind(
        source_rank=0, destination_rank=0, source_blocks=tables[0], destination_blocks=tables[1],
        tokens=tokens,
    )  # fmt: skip
    for copy in bound.copies:
        here, there = pools[0][copy.source_pool], pools[1][copy.destination_pool]
        ends = copy.source.tolist(), copy.destination.tolist(), copy.length.tolist()
        for start, to, nbytes in zip(*ends, strict=True):
            there[to : to + nbytes] = here[start : start + nbytes]


def states(made: Plan, layer: str, tensor: Tensor, tables: Any, tokens: int) -> NDArray[Any]:
    """The states of a request that are still seen, in the order of tokens."""
    group = made.region_of(layer)[0].group
    chosen: NDArray[Any] = tensor.logical[tables[group]]
    if "N" not in tensor.axes:
        return chosen
    each = made.spec(layer).tokens_per_state
    assert each
    first = made.groups[group].visibility.first(tokens)
    chosen = chosen.reshape(-1, *chosen.shape[2:])
    return chosen[first // each : tokens // each]


def put_states(
    made: Plan, layer: str, tensor: Tensor, tables: Any, tokens: int, found: NDArray[Any]
) -> None:
    """Write these states into an engine's array."""
    group = made.region_of(layer)[0].group
    values, blocks = tensor.logical, tables[group]
    if "N" not in tensor.axes:
        values[blocks] = found
    else:
        each, size = made.spec(layer).tokens_per_state, values.shape[1]
        assert each
        first = made.groups[group].visibility.first(tokens) // each
        for state, one in enumerate(found, start=first):
            values[blocks[state // size], state % size] = one
    tensor.put(values)


def smallest_plan(engine: Engine, policy: Any) -> Plan:
    """A plan of few bytes: all of them are drawn at random."""
    for memory in ("1MiB", "8MiB"):
        with suppress(AtlasError):
            return plan(engine.model, memory=memory, policy=policy, max_len=engine.max_len)
    return plan(engine.model, memory="64MiB", policy=policy, max_len=engine.max_len)


@pytest.mark.parametrize("policy", ["vllm", "atlas"])
@pytest.mark.parametrize("row", ROWS)
def test_every_element_moves_there_and_back(row: str, policy: Any) -> None:
    engine, rng = made_of(row), np.random.default_rng(3)
    tokens = engine.tokens
    for fields in engine.tensors.values():
        for tensor in fields.values():
            tensor.array[...] = rng.integers(1, 250, tensor.array.shape)
    described = engine.described()
    assert [engine.pool_of.get(layer, 0) for layer in described.layers] == [
        described.groups[described.region_of(layer)[0].group].pool for layer in described.layers
    ]
    ours = smallest_plan(engine, policy)
    pools = [rng.integers(0, 256, pool.nbytes, dtype=np.uint8) for pool in ours.pools]
    tables = tables_of(described, tokens, first=1), tables_of(ours, tokens, first=2)
    carry(described, ours, tables, tokens, (engine.memory, pools))
    compared = 0
    for layer, fields in engine.tensors.items():
        for name, tensor in fields.items():
            wanted = states(described, layer, tensor, tables[0], tokens)
            pool = pools[ours.groups[ours.region_of(layer)[0].group].pool]
            own = seen(ours, pool, layer, name, tensor.array.dtype.str)
            found = states(ours, layer, own, tables[1], tokens)
            assert np.array_equal(found.ravel(), wanted.ravel()), (layer, name)
            compared += wanted.size
    assert compared > 100

    again, right = made_of(row), made_of(row)
    back = tables_of(described, tokens, first=2)
    for layer, fields in engine.tensors.items():
        for name, tensor in fields.items():
            moved = states(described, layer, tensor, tables[0], tokens)
            put_states(described, layer, right.tensors[layer][name], back, tokens, moved)
    carry(ours, described, (tables[1], back), tokens, (pools, again.memory))
    for one, other in zip(again.memory, right.memory, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("row", ROWS)
def test_wrong_axes_strides_and_versions_are_refused(row: str) -> None:
    engine = made_of(row)
    layer, fields = next(iter(engine.tensors.items()))
    name = next(iter(fields))
    placed = {
        layer: {name: Placement.from_tensor(*one) for name, one in fields.items()}
        for layer, fields in engine.tensors.items()
    }
    own = placed[layer][name]
    inner = [axis for axis in own.axes if axis != "B" and own.size(axis) != own.size("B")]
    renamed = own.rename(B=inner[0], **{inner[0]: "B"})
    unknown = own.rename(B="X")
    wrong: list[tuple[Callable[[], Placement], tuple[Code, ...]]] = [
        (lambda: renamed, (Code.BAD_TENSOR,)),
        (lambda: unknown, (Code.BAD_TENSOR, Code.UNKNOWN_AXIS)),
        (lambda: with_stride(own, "B", own.item), (Code.OVERLAP,)),
        (lambda: own.shift(max(1, own.item // 2)), (Code.MISALIGNED, Code.OVERLAP)),
    ]
    given = {"max_len": engine.max_len, **engine.options}
    foreign(engine.model, placed, **given)
    for make, codes in wrong:
        with pytest.raises(AtlasError) as refusal:
            foreign(engine.model, placed | {layer: placed[layer] | {name: make()}}, **given)
        assert refusal.value.code in codes, refusal.value
    text = engine.described().to_json()
    assert Plan.from_json(text) == engine.described()
    fields_json = msgspec.json.decode(text)
    for version, code in ((3, Code.UNLIKE_VERSIONS), (1, Code.BAD_PLAN)):
        with pytest.raises(AtlasError) as refusal:
            Plan.from_json(msgspec.json.encode(fields_json | {"version": version}))
        assert refusal.value.code is code


def with_stride(placed: Placement, axis: str, stride: int) -> Placement:
    strides = [
        stride if one == axis else own for one, own in zip(placed.axes, placed.strides, strict=True)
    ]
    return Placement(placed.axes, placed.sizes, tuple(strides), placed.offset, placed.item)


@pytest.mark.parametrize("row", ROWS)
def test_documents_of_the_exchange_format_describe_the_same_memory(row: str) -> None:
    made = made_of(row).described()
    document = to_exchange(made)
    back = from_exchange(document.to_json(), made_of(row).model, max_len=made.max_len)
    assert to_exchange(back) == document
    for layer, fields in made_of(row).tensors.items():
        for one in fields:
            placed = made.view(layer, one), back.view(layer, one)
            assert (
                placed[0].select("B", 2).runs()[0].tolist()
                == placed[1].select("B", 2).runs()[0].tolist()
            )


# -- ranks of an engine ---------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["vllm", "atlas"])
def test_head_groups_of_page_unified_are_ranks(policy: Any) -> None:
    """(pages, groups, L, 2, page, H, D): the memory of a rank begins at its head group."""
    arena, rng = Arena(), np.random.default_rng(3)
    made = arena.take((PAGES, 2, 3, 2, PAGE, 2, WIDTH))
    made[...] = rng.integers(1, 250, made.shape)
    layers = {
        name: {
            side: Placement.from_tensor(made[:, 0, n, place], "BNHC")
            for place, side in enumerate("kv")
        }
        for n, name in enumerate(names(DENSE))
    }
    engine = foreign(DENSE, layers, tp=2, max_len=64)
    ours = plan(DENSE, memory="1MiB", policy=policy, max_len=64)
    pool = rng.integers(0, 256, ours.pools[0].nbytes, dtype=np.uint8)
    tables = tables_of(engine, 40, first=1), tables_of(ours, 40, first=2)
    way = route(engine, ours)
    ends: dict[str, Any] = {"source_blocks": tables[0], "destination_blocks": tables[1]}
    for rank in (0, 1):
        shared = arena.bytes[rank * made.strides[1] :]
        for copy in way.bind(source_rank=rank, destination_rank=0, tokens=40, **ends).copies:
            columns = (copy.source.tolist(), copy.destination.tolist(), copy.length.tolist())
            for start, to, nbytes in zip(*columns, strict=True):
                pool[to : to + nbytes] = shared[start : start + nbytes]
    for n, name in enumerate(names(DENSE)):
        for place, side in enumerate("kv"):
            both = np.concatenate([made[:, 0, n, place], made[:, 1, n, place]], axis=2)
            wanted = states(engine, name, Tensor(both, "BNHC"), tables[0], 40)
            found = states(ours, name, seen(ours, pool, name, side, "u2"), tables[1], 40)
            assert np.array_equal(found, wanted)


@pytest.mark.parametrize("policy", ["vllm", "atlas"])
def test_ranks_of_tensorrt_hold_sections_of_states(policy: Any) -> None:
    """Rank r holds rows of x, of B and of C of the convolution, and the heads of the state."""
    rng, sections = np.random.default_rng(3), (32, 12, 12)
    whole = {
        "conv": rng.integers(1, 250, (3, PAGES, 56, 3)),
        "ssm": rng.integers(1, 250, (3, PAGES, 4, 8, 6)),
    }
    starts = np.cumsum((0, *sections))
    arenas, described = [Arena(), Arena()], []
    for rank, arena in enumerate(arenas):
        rows = np.concatenate(
            [np.arange(size // 2) + start + rank * size // 2
             for start, size in zip(starts, sections, strict=False)]
        )  # fmt: skip
        conv, ssm = arena.take((PAGES, 3, 28, 3)), arena.take((PAGES, 3, 2, 8, 6))
        conv[...] = whole["conv"][:, :, rows].swapaxes(0, 1)
        ssm[...] = whole["ssm"][:, :, 2 * rank : 2 * rank + 2].swapaxes(0, 1)
        layers = {
            name: {
                "conv": Placement.from_tensor(conv[:, n], "BRT"),
                "ssm": Placement.from_tensor(ssm[:, n], "BHPS"),
            }
            for n, name in enumerate(names(MAMBA))
        }
        described.append(foreign(MAMBA, layers, tp=2, max_len=64))
    assert described[0] == described[1]
    ours = plan(MAMBA, memory="1MiB", policy=policy, max_len=64)
    pool = rng.integers(0, 256, ours.pools[0].nbytes, dtype=np.uint8)
    way = route(described[0], ours)
    for rank, arena in enumerate(arenas):
        bound = way.bind(
            source_rank=rank, destination_rank=0, source_blocks=[4], destination_blocks=[2],
            tokens=40,
        )  # fmt: skip
        for copy in bound.copies:
            columns = (copy.source.tolist(), copy.destination.tolist(), copy.length.tolist())
            for start, to, nbytes in zip(*columns, strict=True):
                pool[to : to + nbytes] = arena.bytes[start : start + nbytes]
    for n, name in enumerate(names(MAMBA)):
        for one, axes in (("conv", "BRT"), ("ssm", "BHPS")):
            wanted = Tensor(whole[one][n], axes).logical[4]
            assert np.array_equal(
                seen(ours, pool, name, one, "u2").logical[2].ravel(), wanted.ravel()
            )
