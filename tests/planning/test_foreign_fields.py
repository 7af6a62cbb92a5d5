"""Layouts of other engines whose fields are stored apart, each element read with numpy alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from kvatlas import AtlasError, Code, Placement
from kvatlas.models import Model
from kvatlas.planning import Plan, PoolSegment, foreign, plan
from kvatlas.routing import route
from kvatlas.specs import FullAttention, Mamba2, Spec
from tests.planning.models import model_of

PAGES, PAGE, TOKENS = 7, 16, 40


def three(name: str, spec: Spec) -> Model:
    return model_of(name, {"attn": spec}, {"attn": spec}, {"attn": spec})


DENSE = three("dense", FullAttention(heads=4, head_dim=16))
SCALED = three("scaled", FullAttention(heads=4, head_dim=32, cache="fp8_per_token_head"))
NVFP4 = three("nvfp4", FullAttention(heads=4, head_dim=32, cache="nvfp4"))
MAMBA = three("mamba", Mamba2(heads=4, head_dim=8, groups=1, state_size=6))
LOGICAL = "BkNHCcTRPS"
"""Axes of fields from the outermost to the innermost, as a model numbers its elements."""


class Tensor(NamedTuple):
    """A field in an engine's memory: an array, and the names of its axes."""

    array: NDArray[Any]
    axes: str

    @property
    def order(self) -> list[int]:
        return sorted(range(len(self.axes)), key=lambda n: LOGICAL.index(self.axes[n]))

    @property
    def logical(self) -> NDArray[Any]:
        """A copy with the axes B, N, H, C (or those of a state) in this order, without tiles."""
        ordered = self.array.transpose(self.order)
        tiles = "".join(self.axes[n] for n in self.order).replace("kN", "N.").replace("Cc", "C.")
        shape: list[int] = []
        for name, size in zip(tiles, ordered.shape, strict=True):
            if name == ".":
                shape[-1] *= size
            else:
                shape.append(size)
        return ordered.reshape(shape)

    def put(self, values: NDArray[Any]) -> None:
        order = self.order
        tiled = values.reshape([self.array.shape[n] for n in order])
        self.array[...] = tiled.transpose(np.argsort(order))


Tensors = dict[str, dict[str, Tensor]]


class Arena:
    """An engine's memory: arrays one after another, with guard bytes between them."""

    def __init__(self) -> None:
        rng = np.random.default_rng(7)
        self.bytes = rng.integers(0, 256, 1 << 18, dtype=np.uint8)
        self.used = 64

    def take(self, shape: tuple[int, ...], dtype: str = "u2") -> NDArray[Any]:
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        start, self.used = self.used, (self.used + nbytes + 200) // 64 * 64
        return self.bytes[start : start + nbytes].view(dtype).reshape(shape)


def names(model: Model) -> list[str]:
    return [layer.name for layer in model.layers]


def pairs(model: Model, arrays: Callable[[int], tuple[Any, Any]], axes: str) -> Tensors:
    """K and V of each layer, with the same axes."""
    return {
        name: dict(zip("kv", (Tensor(one, axes) for one in arrays(index)), strict=True))
        for index, name in enumerate(names(model))
    }


def sglang_hnd(arena: Arena) -> Tensors:
    """(2, pages, H, page, D) for each layer."""
    made = [arena.take((2, PAGES, 4, PAGE, 16)) for _ in DENSE.layers]
    return pairs(DENSE, lambda n: (made[n][0], made[n][1]), "BHNC")


def sglang_nhd(arena: Arena) -> Tensors:
    """Rows of K and rows of V for each layer: (2, slots, H, D)."""
    made = [arena.take((2, PAGES * PAGE, 4, 16)) for _ in DENSE.layers]
    paged = [one.reshape(2, PAGES, PAGE, 4, 16) for one in made]
    return pairs(DENSE, lambda n: (paged[n][0], paged[n][1]), "BNHC")


def sglang_page_head(arena: Arena) -> Tensors:
    """(2, pages, H, page, L, D), in host memory."""
    made = arena.take((2, PAGES, 4, PAGE, len(DENSE.layers), 16))
    return pairs(DENSE, lambda n: (made[0, ..., n, :], made[1, ..., n, :]), "BHNC")


def sglang_page_unified(arena: Arena) -> Tensors:
    """(pages, groups, L, 2, page, H, D) with one head group, in host memory."""
    made = arena.take((PAGES, 1, len(DENSE.layers), 2, PAGE, 4, 16))
    return pairs(DENSE, lambda n: (made[:, 0, n, 0], made[:, 0, n, 1]), "BNHC")


def sglang_vectorized(arena: Arena) -> Tensors:
    """K (B, H, D/x, page, x) and V (B, H, page/x, D, x)."""
    found = {}
    for name in names(DENSE):
        k, v = arena.take((PAGES, 4, 2, PAGE, 8)), arena.take((PAGES, 4, 2, 16, 8))
        found[name] = {"k": Tensor(k, "BHCNc"), "v": Tensor(v, "BHkCN")}
    return found


def sglang_scales(arena: Arena) -> Tensors:
    """Codes as bytes, and flat scales in separate tensors for each layer."""
    found: Tensors = {}
    for name in names(SCALED):
        rows = arena.take((2, PAGES, PAGE, 4, 32), "u1")
        scales = arena.take((2, PAGES, PAGE, 4), "u4")
        found[name] = {
            field: Tensor(array[index], axes)
            for index, side in enumerate("kv")
            for field, array, axes in ((side, rows, "BNHC"), (f"{side}_scale", scales, "BNH"))
        }
    return found


def tensorrt_nvfp4(arena: Arena) -> Tensors:
    """Slots of equal buffers: K and V of all layers in one pool, their scales in another."""
    data = arena.take((PAGES, len(NVFP4.layers), 2, 4, PAGE, 16), "u1")
    scales = arena.take((PAGES, len(NVFP4.layers), 2, 4, PAGE, 2), "u1")
    return {
        name: {
            field: Tensor(array[:, place, index], "BHNC")
            for index, side in enumerate("kv")
            for field, array in ((side, data), (f"{side}_scale", scales))
        }
        for place, name in enumerate(names(NVFP4))
    }


def sglang_mamba(arena: Arena) -> Tensors:
    """conv (L, size + 1, dim, K - 1) and temporal (L, size + 1, H, P, S); slot 0 is reserved."""
    width = MAMBA.layers[0].spec.page(1).field("conv").sizes["R"]
    conv = arena.take((3, PAGES, width, 3))
    temporal = arena.take((3, PAGES, 4, 8, 6))
    return {
        name: {"conv": Tensor(conv[n], "BRT"), "ssm": Tensor(temporal[n], "BHPS")}
        for n, name in enumerate(names(MAMBA))
    }


LAYOUTS: dict[str, tuple[Model, Callable[[Arena], Tensors]]] = {
    made.__name__: (model, made)
    for model, made in (
        (DENSE, sglang_hnd), (DENSE, sglang_nhd), (DENSE, sglang_page_head),
        (DENSE, sglang_page_unified), (DENSE, sglang_vectorized), (SCALED, sglang_scales),
        (NVFP4, tensorrt_nvfp4), (MAMBA, sglang_mamba),
    )
}  # fmt: skip


def described(model: Model, tensors: Tensors) -> Plan:
    """The plan of an engine's memory, from its tensors with named axes."""
    return foreign(
        model,
        {
            layer: {name: Placement.from_tensor(*one) for name, one in fields.items()}
            for layer, fields in tensors.items()
        },
        max_len=64,
    )


def states_of(tensor: Tensor, blocks: list[int], count: int) -> NDArray[Any]:
    """The first states of a request in these blocks; of a recurrent state, its one."""
    chosen = tensor.logical[blocks]
    if "N" not in tensor.axes:
        return chosen
    return chosen.reshape(-1, *chosen.shape[2:])[:count]


def seen(made: Plan, pool: NDArray[np.uint8], layer: str, field: str, item: str) -> Tensor:
    """A field of a plan as a tensor; plans that are not foreign are tested elsewhere."""
    view = made.view(layer, field)
    array = view.view(pool).view(item)[..., 0]
    return Tensor(array, "".join(view.axes))


def carry(source: Plan, destination: Plan, blocks: Any, into: Any, pools: Any) -> None:
    bound = route(source, destination).bind(
        source_rank=0, destination_rank=0, source_blocks=blocks, destination_blocks=into,
        tokens=TOKENS,
    )  # fmt: skip
    for copy in bound.copies:
        ends = copy.source.tolist(), copy.destination.tolist(), copy.length.tolist()
        for start, to, nbytes in zip(*ends, strict=True):
            pools[1][to : to + nbytes] = pools[0][start : start + nbytes]


@pytest.mark.parametrize("policy", ["vllm", "atlas"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_element_moves_there_and_back(layout: str, policy: Any) -> None:
    model, make = LAYOUTS[layout]
    arena, rng = Arena(), np.random.default_rng(3)
    tensors = make(arena)
    for fields in tensors.values():
        for tensor in fields.values():
            tensor.array[...] = rng.integers(1, 250, tensor.array.shape)
    engine = described(model, tensors)
    ours = plan(model, memory="1MiB", policy=policy, max_len=64)
    pool = rng.integers(0, 256, ours.pools[0].nbytes, dtype=np.uint8)
    recurrent = ours.groups[0].kind == "recurrent"
    # Page 0 takes the writes of padded requests, so no table has it.
    blocks = [5] if recurrent else [4, 1, 6]
    there = [3] if recurrent else list(range(9, 9 - -(-TOKENS // ours.block_size), -1))
    carry(engine, ours, blocks, there, (arena.bytes, pool))
    for layer, fields in tensors.items():
        for name, tensor in fields.items():
            wanted = states_of(tensor, blocks, TOKENS)
            found = seen(ours, pool, layer, name, tensor.array.dtype.str)
            assert np.array_equal(states_of(found, there, TOKENS).ravel(), wanted.ravel()), name

    again = Arena()
    back = [2] if recurrent else [6, 3, 5]
    right = Arena()
    for before, after in zip(make(right).values(), tensors.values(), strict=True):
        for one, other in zip(before.values(), after.values(), strict=True):
            values, moved = one.logical, states_of(other, blocks, TOKENS)
            if recurrent:
                values[back] = moved
            else:
                for token, state in enumerate(moved):
                    values[back[token // PAGE], token % PAGE] = state
            one.put(values)
    carry(ours, engine, there, back, (pool, again.bytes))
    assert np.array_equal(again.bytes, right.bytes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plan_of_fields_is_json_of_version_2(layout: str) -> None:
    model, make = LAYOUTS[layout]
    made = described(model, make(Arena()))
    text = made.to_json()
    assert text.startswith(b'{"version":2,')
    assert Plan.from_json(text) == made
    assert all(region.apart for region in made.regions)
    assert made.summary()["model"] == model.name
    assert made.explain()
    with pytest.raises(AtlasError) as refusal:
        made.placement(made.layers[0])
    assert refusal.value.code is Code.FIELDS_APART


def test_head_groups_are_ranks() -> None:
    """(pages, groups, L, 2, page, heads, D): a rank of tp 2 begins at each head group."""
    made = Arena().take((PAGES, 2, 3, 2, PAGE, 2, 16))
    tensors = pairs(DENSE, lambda n: (made[:, 0, n, 0], made[:, 0, n, 1]), "BNHC")
    layers = {
        layer: {name: Placement.from_tensor(*one) for name, one in fields.items()}
        for layer, fields in tensors.items()
    }
    seen_plan = foreign(DENSE, layers, tp=2, max_len=64)
    assert seen_plan.page("layers.0.attn", 1).field("k").ranges[0].start == 2
    assert seen_plan.view("layers.2.attn", "v").stride("B") == made.strides[0]


def test_kernel_pages_join_into_blocks() -> None:
    tensors = sglang_hnd(Arena())
    layers = {
        layer: {name: Placement.from_tensor(*one) for name, one in fields.items()}
        for layer, fields in tensors.items()
    }
    wide = foreign(DENSE, layers, max_len=64, blocks=32)
    view = wide.view("layers.1.attn", "v")
    array = tensors["layers.1.attn"]["v"].array
    assert (wide.block_size, wide.num_blocks) == (32, 3)
    at = view(B=2, k=1, N=7, H=3, C=9) - described(DENSE, tensors).view("layers.1.attn", "v").offset
    assert at == int(np.dot((5, 3, 7, 9), array.strides))


def test_bytes_hold_elements() -> None:
    """SGLang stores fp8, and some engines everything, as uint8."""
    tensors = sglang_hnd(Arena())
    as_bytes = {
        layer: {
            name: Placement.from_tensor(one.array.view("u1"), one.axes)
            for name, one in fields.items()
        }
        for layer, fields in tensors.items()
    }
    assert foreign(DENSE, as_bytes, max_len=64) == described(DENSE, tensors)


def changed(layers: Any, layer: str, field: str, placed: Placement | None) -> Any:
    own = {**layers[layer], field: placed}
    return {**layers, layer: {name: one for name, one in own.items() if one is not None}}


HALF = Placement.packed([("B", PAGES), ("H", 2), ("N", PAGE), ("C", 16)], item=2, offset=1 << 17)
WRONG: dict[str, tuple[Placement | None, Code]] = {
    "no v": (None, Code.BAD_TENSOR),
    "half the heads": (HALF, Code.BAD_TENSOR),
    "fewer pages": (
        Placement.packed([("B", 3), ("H", 4), ("N", 16), ("C", 16)], item=2), Code.BAD_TENSOR
    ),
    "other pages": (
        Placement.packed([("B", PAGES), ("H", 4), ("N", 8), ("C", 16)], item=2), Code.BAD_TENSOR
    ),
    "another axis": (
        Placement.packed([("B", PAGES), ("H", 4), ("N", 16), ("D", 16)], item=2), Code.BAD_TENSOR
    ),
    "wide elements": (
        Placement.packed([("B", PAGES), ("H", 4), ("N", 16), ("C", 16)], item=4), Code.BAD_TENSOR
    ),
    "odd address": (
        Placement.packed([("B", PAGES), ("H", 4), ("N", 16), ("C", 16)], item=2, offset=131_001),
        Code.MISALIGNED,
    ),
    "bytes of k": (
        Placement.packed([("B", PAGES), ("H", 4), ("N", 16), ("C", 16)], item=2, offset=64),
        Code.OVERLAP,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_fields_are_refused(name: str) -> None:
    placed, code = WRONG[name]
    layers = {
        layer: {field: Placement.from_tensor(*one) for field, one in fields.items()}
        for layer, fields in sglang_hnd(Arena()).items()
    }
    foreign(DENSE, layers, max_len=64)
    with pytest.raises(AtlasError) as refusal:
        foreign(DENSE, changed(layers, "layers.0.attn", "v", placed), max_len=64)
    assert refusal.value.code is code


# -- several allocations --------------------------------------------------------------------------


def in_segments(made: Plan, *segments: tuple[int, int]) -> Plan:
    (pool,) = made.pools
    parts = tuple(PoolSegment(offset=offset, nbytes=nbytes) for offset, nbytes in segments)
    return msgspec.structs.replace(made, pools=(msgspec.structs.replace(pool, segments=parts),))


def allocations(arena: Arena, tensors: Tensors) -> list[tuple[int, int]]:
    """(offset, bytes) of the allocation that both tensors of a layer share."""
    first = arena.bytes.ctypes.data
    return [
        (own["k"].array.ctypes.data - first, own["k"].array.nbytes + own["v"].array.nbytes)
        for own in tensors.values()
    ]


def test_runs_stay_in_the_segments_of_a_pool() -> None:
    arena = Arena()
    tensors = sglang_hnd(arena)
    parts = allocations(arena, tensors)
    engine = in_segments(described(DENSE, tensors), *parts)
    assert Plan.from_json(engine.to_json()) == engine
    assert engine.to_json().startswith(b'{"version":2,')
    assert len(engine.summary()["pools"][0]["segments"]) == len(parts)
    separate = [arena.bytes[offset : offset + nbytes].copy() for offset, nbytes in parts]
    ours = plan(DENSE, memory="1MiB", max_len=64, layout="BLNHC")
    bound = route(engine, ours).bind(
        source_rank=0, destination_rank=0, source_blocks=[2, 3, 4], destination_blocks=[1, 2, 3],
        tokens=TOKENS,
    )  # fmt: skip
    (copy,) = bound.copies
    which, within = engine.pools[0].locate(copy.source)
    assert set(which.tolist()) == {0, 1, 2}
    for at, index, start, nbytes in zip(
        copy.source.tolist(), which.tolist(), within.tolist(), copy.length.tolist(), strict=True
    ):
        own = separate[index][start : start + nbytes]
        assert np.array_equal(own, arena.bytes[at : at + nbytes])
        assert len(own) == nbytes
    with pytest.raises(AtlasError) as refusal:
        engine.pools[0].locate([parts[0][0] + parts[0][1]])
    assert refusal.value.code is Code.OUT_OF_RANGE


def test_wrong_segments_are_refused() -> None:
    arena = Arena()
    tensors = sglang_hnd(arena)
    made, parts = described(DENSE, tensors), allocations(arena, tensors)
    (one, many), (two, _), (three, _) = parts
    last = made.pools[0].nbytes
    wrong: list[list[tuple[int, int]]] = [
        [], parts[:2], parts[::-1], [(-1, last)], [(0, last + 1)], [(0, 0), *parts],
        [(one, two - one), (two, three - two), parts[2]],  # adjacent
        [(one, many + 300), *parts[1:]],  # overlap
        [(one, many // 2), (one + many // 2 + 1, many // 2 - 1), *parts[1:]],  # a tensor in two
        [*parts[:2], (three + 1, many - 1)],
    ]  # fmt: skip
    in_segments(made, *parts)
    in_segments(made, (0, last))
    for segments in wrong:
        with pytest.raises(AtlasError) as refusal:
            in_segments(made, *segments)
        assert refusal.value.code is Code.BAD_PLAN, segments
