"""How engines call: padded batches, rows outside a batch, odd dtypes, unusual strides and chips."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
torch = pytest.importorskip("torch")

from kvatlas import AtlasError, Code, kernels
from kvatlas.kernels.triton import (
    attend,
    attend_latent,
    between,
    schedule,
    split_of,
    tune,
    write,
    write_latent,
)
from kvatlas.kernels.triton import storage_formats as formats
from kvatlas.kernels.triton.attention import launch_arguments as calls
from kvatlas.kernels.triton.attention.decode_device import decode
from kvatlas.kernels.triton.attention.layer_launch import Scores, layer_launch
from kvatlas.kernels.triton.attention.prefill_device import prefill
from kvatlas.specs import (
    FullAttention,
    Indexer,
    LatentAttention,
    SinkAttention,
    SlidingAttention,
)
from tests.kernels.triton.cases import Pool

SPEC = FullAttention(heads=2, head_dim=16, dtype="fp32")
TABLES = torch.tensor([[3, 1], [7, 4], [2, 0]]).int()


def filled(spec: Any, *, block: int = 16, blocks: int = 12) -> Any:
    layer = Pool(spec, "LBNHC", "cpu", block=block, blocks=blocks).layer
    generator = torch.Generator().manual_seed(2)
    slots = torch.arange(block * blocks)
    k, v = (torch.randn(len(slots), spec.heads, spec.head_dim, generator=generator) for _ in "kv")
    kernels.write(layer, k, v, slots)
    return layer


def queries_of(count: int, dim: int = 16, heads: int = 4) -> Any:
    return torch.randn(count, heads, dim, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("max_queries", [1, None])
def test_sequences_that_pad_a_batch_attend_to_nothing(max_queries: int | None) -> None:
    layer, q = filled(SPEC), queries_of(3)
    out = torch.full_like(q, float("nan"))
    where = {"tables": TABLES, "queries": torch.ones(3, dtype=torch.int32)}
    attend(layer, q, lengths=torch.tensor([20, 0, 5]), max_queries=max_queries, out=out, **where)
    theirs = kernels.attend(layer, q, lengths=torch.tensor([20, 1, 5]), **where)
    assert (out[1] == 0).all()
    assert torch.allclose(out[[0, 2]], theirs[[0, 2]], atol=1e-5)


@pytest.mark.parametrize("cache", ["auto", "int4_per_token_head"])
def test_rows_outside_the_batch_stay(cache: str) -> None:
    spec = FullAttention(heads=2, head_dim=16, cache=cache)
    layer, q = filled(spec), queries_of(5)
    out = torch.ones(5, 4, 16)
    attend(
        layer, q, tables=TABLES[:1], lengths=torch.tensor([20]), starts=torch.tensor([2, 3]),
        max_queries=1, out=out,
    )  # fmt: skip
    theirs = kernels.attend(
        layer, q[2:3], tables=TABLES[:1], lengths=torch.tensor([20]),
        queries=torch.tensor([1]),
    )  # fmt: skip
    assert (out[[0, 1, 3, 4]] == 1).all()
    assert torch.allclose(out[2:3], theirs, atol=1e-4)


def test_scales_are_for_caches_that_have_them() -> None:
    spec = LatentAttention(latent=16, rope=16, dtype="fp32")
    layer, generator = Pool(spec, "LBNHC", "cpu").layer, torch.Generator().manual_seed(1)
    for view in (layer.latent, layer.rope):
        view.copy_(torch.randn(view.shape, generator=generator))
    where = {
        "tables": TABLES[:1], "lengths": torch.tensor([20]), "queries": torch.tensor([1]),
        "scale": 0.2, "kv_scale": 0.5,
    }  # fmt: skip
    q = queries_of(1, 32)
    mine = attend_latent(layer, q, **where)
    assert torch.allclose(mine, kernels.attend_latent(layer, q, **where), atol=1e-5)


def test_a_layer_does_not_remember_every_scale_it_was_called_with() -> None:
    layer, q = filled(SPEC), queries_of(1)
    others = len(layer.kept)
    first = layer_launch(layer, q, Scores(None, None, 1.0, 1.0, False), 1, {})
    for number in range(200):
        scores = Scores(1 / (1 + number), None, 1.0, 1.0, False)
        launch = layer_launch(layer, q, scores, 1, {})
        assert layer_launch(layer, q, scores, 1, {}) is launch
    assert len(layer.kept) - others <= 64
    assert layer_launch(layer, q, Scores(None, None, 1.0, 1.0, False), 1, {}) == first


def test_sums_do_not_depend_on_the_default_dtype() -> None:
    layer, q = filled(SPEC), queries_of(1)
    where = {"tables": TABLES[:1], "lengths": torch.tensor([31]), "queries": torch.tensor([1])}
    plain = attend(layer, q, tile=16, **where)
    torch.set_default_dtype(torch.float16)
    try:
        again = attend(layer, q, tile=16, **where)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(again, plain)


def test_a_prepared_schedule_is_enough() -> None:
    layer, q = filled(SPEC), queries_of(3)
    lengths = torch.tensor([20, 9, 5])
    split = split_of(layer, 4, dtype=q.dtype, max_queries=1)
    plan = schedule(split, lengths, queries=torch.ones(3, dtype=torch.int32))
    where = {"tables": TABLES, "lengths": lengths, "max_queries": 1}
    mine = attend(layer, q, prepared=plan, **where)
    again = attend(layer, q, queries=torch.ones(3, dtype=torch.int32), **where)
    assert torch.equal(mine, again)


@pytest.mark.parametrize(("block", "length", "count", "tile"), [(6, 19, 1, 64), (5, 77, 9, 16)])
def test_blocks_between_the_first_tokens_and_a_window_may_be_anything(
    block: int, length: int, count: int, tile: int
) -> None:
    spec = SinkAttention(heads=2, head_dim=16, dtype="fp32", sink_tokens=2, window=5)
    layer, q = filled(spec, block=block, blocks=20), queries_of(count)
    table = torch.randperm(20, generator=torch.Generator().manual_seed(1))[None]
    where = {"lengths": torch.tensor([length]), "queries": torch.tensor([count])}
    theirs = kernels.attend(layer, q, tables=table, **where)
    left = table.clone()
    left[0, 1 : (length - count - 4) // block] = 10**9
    mine = attend(layer, q, tables=left, tile=tile, **where)
    assert int(left.max()) == 10**9
    assert torch.allclose(mine, theirs, atol=1e-5)


def test_short_rows_of_levels() -> None:
    spec = FullAttention(heads=2, head_dim=8, cache="turboquant_4bit_nc")
    layer, q = filled(spec), queries_of(1, 8)
    where = {"tables": TABLES[:1], "lengths": torch.tensor([20]), "queries": torch.tensor([1])}
    mine = attend(layer, q, **where)
    assert torch.allclose(mine, kernels.attend(layer, q, **where), atol=1e-4)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        (SPEC, torch.float32),
        (FullAttention(heads=2, head_dim=128), torch.float32),
        (FullAttention(heads=2, head_dim=128, dtype="fp32"), torch.bfloat16),
        (FullAttention(heads=2, head_dim=512), torch.bfloat16),
        (FullAttention(heads=2, head_dim=64, v_dim=512), torch.bfloat16),
        (FullAttention(heads=2, head_dim=256, cache="nvfp4"), torch.float16),
        (LatentAttention(), torch.bfloat16),
        (LatentAttention(cache="fp8"), torch.bfloat16),
    ],
)
@pytest.mark.parametrize(("chip", "room"), [("hopper", 232_448), ("any", 101_376)])
def test_programs_fit_the_chip(
    spec: Any, dtype: Any, chip: str, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Pool(spec, "LBNHC", "cpu").layer
    monkeypatch.setattr(tune, "architecture", lambda _: chip)
    free = calls.launch_key(layer, 128, dtype)
    wanted = {kernel: calls.parameters(kernel, free, 64, {}) for kernel in ("decode", "prefill")}
    monkeypatch.setattr(tune, "shared_memory", lambda _: room)
    for kernel, use in wanted.items():
        fitted = calls.parameters(kernel, free, 64, {})
        rows = fitted.get("rows", 64) * free.query
        states = fitted["tile"] * (fitted["stages"] * free.stored + free.converted)
        assert rows + states <= room
        assert min(fitted["tile"], fitted.get("rows", 16)) >= 16
        assert all(fitted[name] <= use[name] for name in ("tile", "stages"))
        assert math.log2(fitted["tile"]).is_integer()


def test_what_fits_no_chip_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = LatentAttention(cache="fp8")
    kind = calls.launch_key(Pool(spec, "LBNHC", "cpu").layer, 128, torch.bfloat16)
    monkeypatch.setattr(tune, "shared_memory", lambda _: 49_152)
    with pytest.raises(AtlasError) as refusal:
        calls.parameters("decode", kind, 64, {})
    assert refusal.value.code is Code.NO_KERNEL


def test_tiles_of_converted_elements_are_not_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = FullAttention(heads=2, head_dim=16, cache="nvfp4")
    kind = calls.launch_key(Pool(spec, "LBNHC", "cpu").layer, 4, torch.bfloat16)
    monkeypatch.setattr(tune, "architecture", lambda _: "hopper")
    monkeypatch.setattr(tune, "shared_memory", lambda _: 232_448)
    there = kind._replace(device=torch.device("cuda", 0))
    assert calls.parameters("decode", there, 16, {"tile": 16})["tile"] == 32
    assert calls.parameters("decode", there._replace(converted=0), 16, {"tile": 16})["tile"] == 16


def test_old_chips_have_no_eight_bit_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = FullAttention(heads=2, head_dim=16, cache="fp8")
    layer = Pool(spec, "LBNHC", "cpu").layer
    monkeypatch.setattr(formats, "takes_ptx", lambda _: True)
    monkeypatch.setattr(tune, "capability", lambda _: (8, 0))
    with pytest.raises(AtlasError) as refusal:
        formats.stored_side(layer, "k")
    assert refusal.value.code is Code.NO_KERNEL
    plain = Pool(SPEC, "LBNHC", "cpu").layer
    assert formats.stored_side(plain, "k").format.kind == "plain"


def test_blocks_do_not_race(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = filled(SPEC)
    copy = between(layer, layer)
    monkeypatch.setenv("KVATLAS_DEBUG", "1")
    for ids, places in (([0, 1], [1, 2]), ([0, 1], [3, 3])):
        with pytest.raises(AtlasError) as refusal:
            copy(torch.tensor(ids), torch.tensor(places))
        assert refusal.value.code is Code.OVERLAP
    copy(torch.tensor([0, 1]), torch.tensor([2, 3]))


def test_a_layer_is_served_by_the_kernels_of_its_kind() -> None:
    attention, latent = filled(SPEC), Pool(LatentAttention(), "LBNHC", "cpu").layer
    rows, slots = torch.zeros(1, 2, 16), torch.tensor([0])
    where = {"tables": TABLES[:1], "lengths": torch.tensor([5]), "queries": torch.tensor([1])}
    for act in (
        lambda: attend(latent, rows, **where),
        lambda: attend_latent(attention, rows, scale=1.0, **where),
        lambda: write(latent, rows, rows, slots),
        lambda: write_latent(attention, rows, rows, slots),
        lambda: split_of(Pool(Indexer(), "LBNHC", "cpu").layer, 4),
        lambda: kernels.attend(latent, rows, **where),
        lambda: kernels.attend_latent(attention, rows, scale=1.0, **where),
        lambda: kernels.write(latent, rows, rows, slots),
        lambda: kernels.read(latent, slots),
        lambda: kernels.write_latent(attention, rows, rows, slots),
        lambda: kernels.read_latent(attention, slots),
        lambda: kernels.write_rows(attention, rows, slots),
        lambda: kernels.read_rows(latent, slots),
    ):
        with pytest.raises(AtlasError) as refusal:
            act()
        assert refusal.value.code is Code.BAD_SPEC


def test_hoppers_kernels_take_the_latents_that_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of heads in 8 and 16 bits; a scale that turns maxima into minima is not theirs."""
    monkeypatch.setattr(tune, "architecture", lambda _: "hopper")
    monkeypatch.setattr(tune, "shared_memory", lambda _: 232_448)
    monkeypatch.setattr(formats, "dot_of", lambda _: tl.bfloat16)
    own = []
    for cache in ("auto", "fp8"):
        layer = Pool(LatentAttention(cache=cache), "LBNHC", "cpu", block=64).layer
        for heads, scale in ((128, 0.1), (16, 0.1), (128, -0.1), (16, 0.0)):
            q = torch.empty(1, heads, 576, dtype=torch.bfloat16)
            launch = layer_launch(layer, q, Scores(scale, None, 1.0, 1.0, False), 1, {}).decode
            assert (launch.kernel is not decode) == (scale > 0)
            assert launch.tiling.together == (2 if scale > 0 else 1)
            own.append(launch.kernel)
    assert len(set(own)) == 3


def test_hoppers_prefill_takes_the_rows_that_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 128 elements in 16, 8 and 4 bits, causal masks, positive scales."""
    monkeypatch.setattr(tune, "architecture", lambda _: "hopper")
    monkeypatch.setattr(tune, "shared_memory", lambda _: 232_448)
    monkeypatch.setattr(formats, "dot_of", lambda _: tl.bfloat16)
    base: dict[str, Any] = {"heads": 2, "head_dim": 128}
    plain = Scores(0.1, None, 1.0, 1.0, False)
    for spec, scores, own in (
        (FullAttention(**base), plain, True),
        (FullAttention(**base, cache="fp8"), plain, True),
        (FullAttention(**base, cache="int8_per_token_head"), plain, True),
        (FullAttention(**base, cache="fp8_per_token_head"), plain, True),
        (FullAttention(**base, cache="int4_per_token_head"), plain, True),
        (FullAttention(**base, cache="nvfp4"), plain, True),
        (FullAttention(**base), plain._replace(sink_logits=True), False),
        (SlidingAttention(**base, window=70), plain, False),
        (FullAttention(**base), plain._replace(scale=-0.1), False),
        (FullAttention(**base), plain._replace(softcap=2.0), False),
        (FullAttention(**base, cache="fp8_e5m2"), plain, False),
        (FullAttention(**base, cache="turboquant_4bit_nc"), plain, False),
        (FullAttention(**base, packing="tiled_planes"), plain, False),
        (FullAttention(**base, packing="transposed"), plain, False),
        (FullAttention(heads=2, head_dim=256), plain, False),
        (FullAttention(heads=2, head_dim=128, v_dim=64), plain, False),
        (SinkAttention(**base, sink_tokens=4, window=70), plain, False),
    ):
        layer = Pool(spec, "LBHNC", "cpu").layer
        q = torch.empty(1, 8, spec.head_dim, dtype=torch.bfloat16)
        launch = layer_launch(layer, q, scores, None, {}).prefill
        assert launch is not None
        assert (launch.kernel is not prefill) == own, spec


def test_a_batch_without_sequences_is_no_error() -> None:
    out = torch.ones(4, 4, 16)
    none = torch.zeros(0, dtype=torch.int32)
    attend(filled(SPEC), queries_of(4), tables=TABLES[:0], lengths=none, queries=none, out=out)
    assert (out == 1).all()


class Loaded(int):
    """A number of the device."""

    def to(self, _: object) -> Loaded:
        return self


class Memory:
    """Numbers of the device, from a place on."""

    def __init__(self, numbers: list[int], place: int = 0) -> None:
        self.numbers, self.place = numbers, place

    def __add__(self, more: int) -> Memory:
        return Memory(self.numbers, self.place + more)


def test_hoppers_prefill_has_rows_to_write_where_a_sequence_has_no_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every tile of queries is somebody's, that of a sequence without states too: it gets zeros."""
    groups = pytest.importorskip("kvatlas.kernels.triton.attention.hopper_prefill_groups_device")
    counts, lengths = [40, 70], [0, 300]
    ends = Memory([0, 40, 110, 0, 0, 0, 0, 2, 5])  # of queries, of decoded tiles, of prefilled
    batch = calls.BatchSequences(Memory(lengths), ends, 2)  # type: ignore[arg-type]
    tiling = calls.Tiling(128, 128, "", 0, 2, "", 1)
    for program in range(7):
        fake = SimpleNamespace(
            load=lambda at: Loaded(at.numbers[at.place]), minimum=min, maximum=max, int32=None,
            cdiv=lambda a, b: -(-a // b), num_programs=lambda _: 7,
            program_id=lambda _, program=program: program,
        )  # fmt: skip
        monkeypatch.setattr(groups, "gl", fake)
        if program == 0:
            monkeypatch.setattr(groups, "find", groups.find.fn)
        shape = SimpleNamespace(out=SimpleNamespace(group=4))
        work = groups.work_of.fn(batch, 0, shape, tiling)
        assert work.rows == (4 * counts[work.sequence] if program < 5 else 0)
        assert (work.end > 0) == (program < 3)
