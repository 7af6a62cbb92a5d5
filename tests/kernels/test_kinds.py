"""Every kind of cache is written and read where its page says, by an address for each element."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvatlas import AtlasError, Code, DType
from kvatlas.cache import LayerCache
from kvatlas.kernels import (
    attend_latent,
    decode_latent,
    encode_latent,
    read,
    read_latent,
    read_rows,
    read_states,
    write,
    write_latent,
    write_rows,
    write_states,
)
from kvatlas.specs import (
    ATTENTION_CACHES,
    CompressorState,
    CrossAttention,
    FullAttention,
    Indexer,
    LatentAttention,
    ShortConv,
    Spec,
)
from tests.guards import ORDERS, Guarded, cache_of, small_plan
from tests.planning.models import SMALL, model_of


def number(layer: LayerCache, field: str, dtype: str, **at: int) -> float:
    """One element, read from the bytes at its address and decoded without torch."""
    start = layer.place(field)(**at)
    code = bytes(layer.buffer[start : start + DType.of(dtype).item].tolist())
    return DType.of(dtype).decode(int.from_bytes(code, "little"))


def rows_of(seed: int, *shape: int) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


PACKINGS = ["cells", "head_groups", "planes", "tiled_planes", "transposed"]


@pytest.mark.parametrize("many", [1, 256])
@pytest.mark.parametrize("packing", PACKINGS)
def test_keys_of_every_packing_lie_where_the_page_says(
    packing: Any, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole prefills, runs and single slots alike, in bf16 that represents them exactly."""
    monkeypatch.setattr("kvatlas.kernels.rows_by_slot._MANY", many)
    for order in ORDERS:
        check_packing(packing, order)


def check_packing(packing: Any, order: str) -> None:
    spec = CrossAttention(heads=2, head_dim=16, source=64, packing=packing)
    try:
        _, layer = cache_of(spec, order)
        layer.place("k")
    except AtlasError as refusal:
        assert packing in ("tiled_planes", "transposed")
        assert refusal.code in (Code.NOT_CONTIGUOUS, Code.LAYOUT_REFUSED)
        return
    k, v = (rows_of(seed, 45, 2, 16).bfloat16() for seed in (1, 2))
    slots = torch.cat((torch.arange(35, 75), torch.tensor([3, 90, 5, 101, 4])))
    write(layer, k, v, slots)
    for row, head, element in product((0, 7, 39, 40, 44), (0, 1), (0, 9, 15)):
        block, state = divmod(int(slots[row]), 16)
        at = {"B": block, "H": head, "N": state}
        inside = {"C": element}
        if packing == "tiled_planes":
            inside = {"C": element // 8, "c": element % 8}
        assert number(layer, "k", "bf16", **at, **inside) == k[row, head, element]
        assert number(layer, "v", "bf16", **at, C=element) == v[row, head, element]
    for chosen in (torch.arange(45), torch.tensor([44, 2, 17])):
        for dtype in (torch.float32, torch.bfloat16):
            stored = read(layer, slots[chosen], dtype=dtype)
            assert stored[0].dtype is dtype
            assert torch.equal(stored[0].bfloat16(), k[chosen])
            assert torch.equal(stored[1].bfloat16(), v[chosen])
    for skipped in (0, 1):  # rows that no wide word fits
        out = [rows.new_empty(rows.numel() + skipped)[skipped:].view(rows.shape) for rows in (k, v)]
        read(layer, slots, out=(out[0], out[1]))
        assert torch.equal(out[0], k)
        assert torch.equal(out[1], v)


LATENTS = [
    {}, {"cache": "fp8"}, {"cache": "fp8_ds_mla"}, {"cache": "nvfp4_ds_mla"},
    {"cache": "fp8_ds_mla", "version": "v4", "latent": 448},
    {"cache": "fp8_ds_mla", "version": "v4.1", "latent": 448},
    {"cache": "nvfp4_ds_mla", "version": "v4.1", "latent": 448},
]  # fmt: skip
# Largest relative error of a latent in the 2-norm; of its rotary part.
LATENT_BOUNDS = [(0.01, 0.01), (0.04, 0.04), (0.04, 0.01), (0.15, 0.04)]
LATENT_BOUNDS += [(0.04, 0.01), (0.04, 0.04), (0.15, 0.15)]


@pytest.mark.parametrize(("form", "bounds"), list(zip(LATENTS, LATENT_BOUNDS, strict=True)))
def test_latents_of_every_format(
    form: Any, bounds: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.kernels.rows_by_slot._MANY", 1)
    for order in ("LBNHC", "BLHNC", "BHLNC"):
        check_latent_format(form, bounds, order)


def check_latent_format(form: Any, bounds: tuple[float, float], order: str) -> None:
    spec = LatentAttention(**form)
    _, layer = cache_of(spec, order, block_size=64)
    latent, rope = rows_of(3, 70, spec.latent), rows_of(4, 70, 64)
    slots = torch.cat((torch.arange(30, 98), torch.tensor([5, -1])))
    write_latent(layer, latent, rope, slots)
    kept = slots >= 0
    stored = read_latent(layer, slots[kept])
    for got, rows, bound in zip(stored, (latent, rope), bounds, strict=True):
        error = (got - rows[kept]).norm(dim=-1) / rows[kept].norm(dim=-1)
        assert bound / 8 < error.max() < bound or form == {}
    again = decode_latent(spec, encode_latent(spec, layer.page, latent[kept], rope[kept]))
    assert torch.equal(stored[0], again[0])
    assert torch.equal(stored[1], again[1])
    write_latent(layer, torch.zeros(1, spec.latent), torch.zeros(1, 64), slots[:1])
    assert not torch.cat(read_latent(layer, slots[:1]), -1).any()


@pytest.mark.parametrize("form", LATENTS)
def test_attention_over_latents_of_every_format(form: Any) -> None:
    """Scores and values are those of the rows that the cache holds."""
    spec = LatentAttention(**form)
    _, layer = cache_of(spec, "LBNHC", block_size=64)
    latent, rope = rows_of(3, 70, spec.latent), rows_of(4, 70, 64)
    slots = torch.cat((3 * 64 + torch.arange(64), 64 + torch.arange(6)))
    write_latent(layer, latent, rope, slots)
    value, rotary = read_latent(layer, slots)
    q = rows_of(5, 2, 3, spec.latent + 64)
    out = attend_latent(
        layer, q, tables=torch.tensor([[3, 1]]), lengths=torch.tensor([70]),
        queries=torch.tensor([2]), scale=0.05,
    )  # fmt: skip
    logits = torch.einsum("thd,sd->ths", q, torch.cat((value, rotary), -1)) * 0.05
    logits[0, :, 69] = -torch.inf
    assert torch.allclose(out, logits.softmax(-1) @ value, atol=1e-4)


def test_scales_of_latents_lie_where_kernels_read_them() -> None:
    """FlashMLA's nvfp4 deals scales out: that of block s is at byte 8 (s mod 4) + s // 4."""
    spec = LatentAttention(cache="nvfp4_ds_mla")
    _, layer = cache_of(spec, "LBNHC", block_size=64)
    latent = torch.ones(1, 512) * (torch.arange(512) // 16 + 1)
    write_latent(layer, latent, torch.zeros(1, 64), torch.tensor([64 + 5]))
    row = layer.tensor[1, 0, 5]
    for s in range(32):
        stored = DType.of("e4m3").decode(int(row[320 + 8 * (s % 4) + s // 4]))
        assert stored == DType.of("e4m3").decode(DType.of("e4m3").encode((s + 1) / 6))
    v4 = LatentAttention(cache="fp8_ds_mla", version="v4", latent=448)
    _, layer = cache_of(v4, "LBNHC", block_size=64)
    write_latent(layer, torch.full((1, 448), 300.0), torch.zeros(1, 64), torch.tensor([64]))
    page = layer.tensor[1].flatten()
    assert page[:448].tolist() == [DType.of("e4m3").encode(300.0)] * 448
    assert page[64 * 576 : 64 * 576 + 8].tolist() == [127] * 7 + [0]  # 2**0, and the pad


@pytest.mark.parametrize(("cache", "bound"), [("fp8", 0.04), ("mxfp4", 0.2), ("bf16", 0.005)])
def test_indexer_rows_and_their_scales(cache: Any, bound: float) -> None:
    keys, slots = rows_of(6, 70, 128), torch.arange(30, 100)
    exact = torch.randint(-4, 5, (70, 128)) * 2.0
    exact[:, ::32] = 8.0
    for order in ("LBNHC", "BLHNC", "BHLNC"):
        _, layer = cache_of(Indexer(cache=cache), order, block_size=64)
        write_rows(layer, keys, slots)
        error = (read_rows(layer, slots) - keys).norm(dim=-1) / keys.norm(dim=-1)
        assert bound / 8 < error.max() < bound, order
        write_rows(layer, exact / 2, slots)
        assert torch.equal(read_rows(layer, slots), exact / 2), order


def test_compressor_sums() -> None:
    spec = CompressorState(width=64, window=8)
    _, layer = cache_of(spec, "BLHNC")
    rows, slots = rows_of(7, 9, 64), torch.tensor([3, 9, 1, 0, 14, 8, 20, 21, 5])
    write_rows(layer, rows, slots)
    assert torch.equal(read_rows(layer, slots), rows)
    with pytest.raises(AtlasError) as refusal:
        write_rows(layer, rows[:, :9], slots)
    assert refusal.value.code is Code.BAD_TENSOR


RECURRENT = ["delta hybrid", "mamba hybrid", "conv hybrid", "cut hybrid", "recurrent"]


@pytest.mark.parametrize("name", RECURRENT)
def test_states_go_into_blocks_and_come_back(name: str) -> None:
    for order in ORDERS:
        check_states(name, order)


def check_states(name: str, order: str) -> None:
    made = small_plan(SMALL[name], layout=order)
    guarded = Guarded(made)
    for layer in guarded.cache:
        parts = guarded.cache.parts(layer)
        if made.groups[made.region_of(layer)[0].group].kind != "recurrent":
            continue
        whole = made.region_of(layer)[0].layers[0].spec.page(1)
        shapes = {f.name: [axis.size for axis in f.axes] for f in whole.fields}
        ids: Any = torch.tensor([5, 1, 3])
        if len({made.region_of(layer, part)[0].group for part in range(len(parts))}) > 1:
            with pytest.raises(AtlasError) as refusal:
                read_states(parts, ids)
            assert refusal.value.code is Code.OVERLAP
            ids = [torch.tensor([5, 1, 3]) + 6 * part for part in range(len(parts))]
        back = [one.flip(0) for one in ids] if isinstance(ids, list) else ids.flip(0)
        states = {n: rows_of(len(n), 3, *shape).bfloat16() for n, shape in shapes.items()}
        write_states(parts, states, ids)
        stored = read_states(parts, ids)
        for field, given in states.items():
            assert torch.equal(stored[field].bfloat16(), given)
            _check_addresses(parts, field, given, ids)
        turned = read_states(parts, ids, conv="DS")["conv"]
        assert torch.equal(turned.transpose(1, 2), stored["conv"])
        write_states(parts, {"conv": turned}, back, conv="DS")
        assert torch.equal(read_states(parts, back)["conv"], stored["conv"])


def _check_addresses(parts: list[LayerCache], name: str, given: Any, ids: Any) -> None:
    """Each row of a part is the row of the model that its pieces name."""
    for part, places in zip(parts, ids if isinstance(ids, list) else [ids] * 9, strict=False):
        field = part.page.field(name)
        axes = [axis.name for axis in field.axes]
        cut = axes.index(str(field.sharding.axis))
        for piece in field.ranges:
            at = dict.fromkeys(axes, 0) | {axes[cut]: piece.local + piece.length - 1}
            there = [0] * len(axes)
            there[cut] = piece.start + piece.length - 1  # one rank: rows are the model's own
            stored = number(part, name, field.dtype.name, B=int(places[1]), **at)
            assert stored == given[(1, *there)], (name, piece)


def test_both_conv_orders_of_a_spec() -> None:
    for order in ("TR", "RT"):
        turned: dict[str, Spec] = {"conv": ShortConv(width=32, conv_order=order)}
        made = small_plan(model_of("conv", *[turned] * 3))
        layer = Guarded(made).cache["layers.1.conv"]
        state = rows_of(8, 2, 2, 32).bfloat16()
        write_states(layer, {"conv": state}, torch.tensor([4, 2]), conv="SD")
        assert torch.equal(read_states(layer, torch.tensor([4, 2]), conv="SD")["conv"], state)
        assert number(layer, "conv", "bf16", B=2, T=1, R=30) == state[1, 1, 30]


def test_states_that_do_not_fit_are_refused() -> None:
    parts = Guarded(small_plan(SMALL["delta hybrid"])).cache.parts("layers.0.linear")
    good = {n: torch.zeros(t.shape) for n, t in read_states(parts, torch.tensor([1])).items()}
    for states, ids in (
        ({"conv": good["conv"][:, :, 1:]}, [1]),
        (good, [1, 2]),
        ({"ssm": good["ssm"][:, 1:]}, [1]),
    ):
        with pytest.raises(AtlasError) as refusal:
            write_states(parts, states, torch.tensor(ids))
        assert refusal.value.code is Code.BAD_TENSOR
    for wrong in ([torch.tensor([1])] * 2, []):
        with pytest.raises(AtlasError) as refusal:
            read_states(parts, wrong)
        assert refusal.value.code is Code.BAD_TENSOR
    with pytest.raises(AtlasError) as refusal:
        write_states(parts, good, torch.tensor([10**6]))
    assert refusal.value.code is Code.OUT_OF_RANGE


def test_batches_of_padding_leave_no_trace() -> None:
    """Every slot is negative, in every format."""
    nowhere = torch.full((3,), -1)
    specs: list[Any] = [FullAttention(heads=2, head_dim=32, cache=c) for c in ATTENTION_CACHES]
    forms: list[Any] = LATENTS
    specs += [LatentAttention(**form) for form in forms]
    specs += [Indexer(cache=cache) for cache in ("fp8", "mxfp4", "bf16")]
    for spec in specs:
        _, layer = cache_of(spec, "LBNHC", block_size=64)
        before = layer.buffer.clone()
        if isinstance(spec, FullAttention):
            write(layer, torch.ones(3, 2, 32), torch.ones(3, 2, 32), nowhere)
        elif isinstance(spec, LatentAttention):
            write_latent(layer, torch.ones(3, spec.latent), torch.ones(3, 64), nowhere)
        else:
            write_rows(layer, torch.ones(3, 128), nowhere)
        assert torch.equal(layer.buffer, before), spec


def test_rows_and_slots_are_as_many() -> None:
    spec = FullAttention(heads=2, head_dim=8)
    _, layer = cache_of(spec, "LBNHC")
    rows = torch.zeros(3, 2, 8)
    for slots in (torch.tensor([1, 2]), torch.tensor(1), torch.tensor([[1], [2], [3]])):
        with pytest.raises(AtlasError) as refusal:
            write(layer, rows, rows, slots)
        assert refusal.value.code is Code.BAD_TENSOR
    with pytest.raises(AtlasError) as refusal:
        write(layer, rows, torch.tensor(0.0), torch.tensor([1, 2, 3]))
    assert refusal.value.code is Code.BAD_TENSOR


def test_recurrent_pages_have_no_rows() -> None:
    layer = Guarded(small_plan(SMALL["recurrent"])).cache["layers.0.mixer"]
    for act in (read, read_latent, read_rows):
        with pytest.raises(AtlasError) as refusal:
            act(layer, torch.tensor([0]))
        assert refusal.value.code is Code.BAD_SPEC


def test_room_for_other_rows_is_refused() -> None:
    spec = FullAttention(heads=2, head_dim=16, dtype="fp32")
    _, layer = cache_of(spec, "LBNHC")
    four, two = torch.zeros(4, 2, 16), torch.zeros(2, 2, 16)
    for out in ((two, two), (four, two), (four, four.double()), (four, four.bfloat16())):
        with pytest.raises(AtlasError) as refusal:
            read(layer, torch.tensor([3, 9, 50, 7]), out=out)
        assert refusal.value.code is Code.BAD_TENSOR
