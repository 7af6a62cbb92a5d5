"""Routes that convert: every pair of formats, every kind of layer, against float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, permutations, product
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from kvatlas import AtlasError, Code, Placement
from kvatlas.kernels.cell_conversion import convert_cells
from kvatlas.models import Model
from kvatlas.planning import Plan, foreign, plan
from kvatlas.routing import check, route
from kvatlas.routing.conversion import LARGEST_SCALE, ROW_ERRORS, SMALLEST_SCALE, row_error
from kvatlas.specs import (
    ATTENTION_CACHES,
    CellFormat,
    ChunkedAttention,
    CompressorState,
    CrossAttention,
    FullAttention,
    GatedDeltaNet,
    Indexer,
    KimiDelta,
    LatentAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    Rwkv7,
    ShortConv,
    SinkAttention,
    SlidingAttention,
    SlidingLatentAttention,
    Spec,
    TensorScales,
    content_formats,
)
from kvatlas.specs.cell_formats import needs_scales
from tests.kernels.test_codec import documented
from tests.planning.models import model_of
from tests.profiles import DEEP
from tests.routing import conversion_oracle as formats
from tests.routing.cases import moving, small_plan, stacked
from tests.routing.converting import (
    SCALES,
    assert_close,
    assert_converted,
    assert_converts,
    carry_out,
    conversion_of,
    fill_sources,
)
from tests.routing.strategies import ATTENTION as ATTENTION_KINDS
from tests.routing.strategies import LATENT as LATENT_KINDS
from tests.routing.strategies import RECURRENT as RECURRENT_KINDS
from tests.routing.strategies import models
from tests.routing.strategies import planned as drawn_plan

INT8 = "int8_per_token_head"
PLAIN = ("bf16", "fp16", "fp32")
ATTENTION = (*PLAIN, *(c for c in ATTENTION_CACHES if c not in ("auto", "fp8_e4m3")))
KINDS: tuple[tuple[type[Spec], dict[str, Any]], ...] = (
    (FullAttention, {}),
    (SlidingAttention, {"window": 25}),
    (ChunkedAttention, {"chunk": 16}),
    (SinkAttention, {"sink_tokens": 4, "window": 16}),
    (CrossAttention, {"source": 37}),
)
LATENT: dict[str, tuple[tuple[str, ...], dict[str, int]]] = {
    "v3": ((*PLAIN, "fp8", "fp8_ds_mla", "nvfp4_ds_mla"), {"latent": 128, "rope": 16}),
    "v4": ((*PLAIN, "fp8_ds_mla"), {"latent": 64, "rope": 16}),
    "v4.1": (("bf16", "fp8", "fp8_ds_mla", "nvfp4_ds_mla"), {"latent": 48, "rope": 16}),
}


def written(cache: str) -> dict[str, str]:
    """How a spec is told of a format."""
    return {"dtype": cache} if cache in PLAIN else {"cache": cache}


def attention(cache: str, kind: type[Spec] = FullAttention, **more: Any) -> Spec:
    return kind(**{"heads": 2, "head_dim": 64, **written(cache), **more})


def latent(
    cache: str, version: str = "v3", kind: type[Spec] = LatentAttention, **more: Any
) -> Spec:
    return kind(version=version, **LATENT[version][1], **written(cache), **more)


def planned(*specs: Spec, **ask: Any) -> Plan:
    """A small plan, in an order that all its layers' backends take."""
    try:
        return small_plan(stacked("model", *specs), **ask)
    except AtlasError:
        ask.pop("layout", None)
        ask.pop("block_size", None)
        return small_plan(stacked("model", *specs), **ask)


def pair_of(src: Spec, dst: Spec, *, tokens: int = 20, ends: tuple[Any, Any] = ({}, {})) -> Any:
    here, there = (planned(spec, spec, **ask) for spec, ask in zip((src, dst), ends, strict=True))
    return moving(here, there, tokens)


# -- cells --------------------------------------------------------------------------------------


def cells_convert(src: Spec, dst: Spec, rows: dict[str, Any]) -> None:
    """Cells by themselves: decoded and encoded in float64 by the formats' definitions."""
    names = [content_formats(spec)["rows"] for spec in (src, dst)]
    scales = [
        TensorScales(*SCALES[name]) if needs_scales(spec) else TensorScales()
        for name, spec in zip(names, (src, dst), strict=True)
    ]
    ends = [CellFormat(spec, scales=own) for spec, own in zip((src, dst), scales, strict=True)]
    fields = formats.encode(src, rows, scales[0], names[0])
    count = len(next(iter(rows.values())))
    given = np.concatenate([fields[r.name].reshape(count, -1) for r in ends[0].rows], axis=1)
    made = convert_cells(given, *ends)
    found = {
        r.name: made[:, r.at : r.at + r.nbytes].reshape(count, r.items, -1) for r in ends[1].rows
    }
    numbers = formats.decode(src, fields, scales[0])
    right = formats.encode(dst, numbers, scales[1], names[0])
    there, expected = (formats.decode(dst, one, scales[1]) for one in (found, right))
    for part, values in there.items():
        pair = names[0], names[1]
        assert_close(values, expected[part], numbers[part], pair, f"{part}, {pair}")


@pytest.mark.parametrize("src", ATTENTION)
def test_every_pair_of_attention_formats_is_decoded_and_encoded(src: str) -> None:
    rng = np.random.default_rng(1)
    for dst in ATTENTION:
        if dst != src:
            rows = {side: rng.standard_normal((64, 64)) for side in "kv"}
            cells_convert(attention(src), attention(dst), rows)


@pytest.mark.parametrize("version", LATENT)
def test_every_pair_of_latent_formats_is_decoded_and_encoded(version: str) -> None:
    rng = np.random.default_rng(2)
    caches, sizes = LATENT[version]
    for src, dst in permutations(caches, 2):
        rows = {part: rng.standard_normal((64, size)) for part, size in sizes.items()}
        cells_convert(latent(src, version), latent(dst, version), rows)


def test_every_pair_of_indexer_formats_is_decoded_and_encoded() -> None:
    rng = np.random.default_rng(3)
    for src, dst in permutations(("fp8", "mxfp4", "bf16"), 2):
        one, two = (Indexer(head_dim=64, cache=cache) for cache in (src, dst))  # type: ignore[arg-type]
        cells_convert(one, two, {"index": rng.standard_normal((64, 64))})


def test_the_stated_errors_are_those_of_the_docs() -> None:
    for name in ATTENTION:
        if name not in PLAIN:
            sides = [documented()[name, side] for side in "kv"]
            worst = tuple(max(bounds) for bounds in zip(*sides, strict=True))
            assert tuple(ROW_ERRORS[name]) == worst
    assert row_error("bf16", "fp32") == row_error("fp8", "fp8") == (0.0, 0.0)


# -- routes -------------------------------------------------------------------------------------

ENDS = (
    ({"layout": "LBNHC", "tp": 2}, {"layout": "BLHNC", "block_size": 32}),
    ({"layout": "BHLNC", "block_size": 32}, {"layout": "LBHNC", "tp": 2}),
    ({"layout": "BLNHC", "tp": 2}, {"layout": "LBNHC", "tp": 4, "pp": 2}),
)


def covering(names: tuple[str, ...]) -> list[tuple[str, str]]:
    """Pairs in which each name is a source and a target; all of them in the deep profile.

    Cells are converted by themselves in every pair above: here it is where they go.
    """
    if DEEP:
        return list(permutations(names, 2))
    half = len(names) // 2
    return [(name, names[(place + half) % len(names)]) for place, name in enumerate(names)]


def test_attention_converts_across_orders_blocks_and_ranks() -> None:
    kinds, ends = cycle(KINDS), cycle(ENDS)
    for src, dst in covering(ATTENTION):
        kind, more = next(kinds)
        specs = (attention(cache, kind, **more) for cache in (src, dst))
        assert_converts(pair_of(*specs, ends=next(ends)))


def test_packings_convert() -> None:
    for packing in ("head_groups", "planes", "tiled_planes", "transposed"):
        for one, two in (
            (attention("bf16", packing=packing), attention("fp8")),
            (attention("int8_per_token_head"), attention("fp16", packing=packing)),
        ):
            assert_converts(pair_of(one, two, tokens=18, ends=({}, {"block_size": 32})))
    inline = attention("fp8_per_token_head", packing="head_groups", scales="planes")
    assert_converts(pair_of(inline, attention("bf16")))


def test_latent_rows_convert_across_orders_and_blocks() -> None:
    for version, (caches, _) in LATENT.items():
        for src, dst in covering(caches):
            kind, more = (
                (SlidingLatentAttention, {"window": 20})
                if src in PLAIN and version == "v4"
                else (LatentAttention, {"compress": 4 if version == "v4" else 1})
            )
            specs = [latent(cache, version, kind, **more) for cache in (src, dst)]
            assert_converts(pair_of(*specs, tokens=72, ends=({"tp": 2}, {})))


def test_a_sparse_model_converts_its_latent_and_copies_or_converts_its_indexer() -> None:
    for index in ("fp8", "mxfp4"):
        caches = [
            {"attn": latent("bf16"), "indexer": Indexer(head_dim=64, cache="fp8")},
            {"attn": latent("fp8_ds_mla"), "indexer": Indexer(head_dim=64, cache=index)},
        ]
        src, dst = (small_plan(model_of("sparse", own, own)) for own in caches)
        named = conversion_of(src, dst)
        assert named == "bf16->fp8_ds_mla" + ("" if index == "fp8" else ", fp8->mxfp4")
        assert_converts(moving(src, dst, 70))
    sums = [CompressorState(width=6, window=8, dtype=dtype) for dtype in ("fp32", "bf16")]
    rows = latent("bf16", compress=4)
    src, dst = (small_plan(model_of("m", {"attn": rows, "compressor": one})) for one in sums)
    assert_converts(moving(src, dst, 40))


def states(dtype: str, conv: str, order: str) -> list[Spec]:
    """Every recurrent kind."""
    both: dict[str, Any] = {"conv_dtype": conv, "conv_order": order}
    return [
        Mamba1(inner=16, state_size=4, ssm_dtype=dtype, **both),
        Mamba2(heads=4, head_dim=4, groups=2, state_size=3, ssm_dtype=dtype, **both),
        GatedDeltaNet(key_heads=2, value_heads=4, key_dim=4, value_dim=3, ssm_dtype=dtype, **both),
        KimiDelta(heads=4, head_dim=4, ssm_dtype=dtype, **both),
        LightningAttention(heads=4, head_dim=4, ssm_dtype=dtype),
        ShortConv(width=8, **both),
        Rwkv7(heads=4, head_dim=4, hidden=16, ssm_dtype=dtype, shift_dtype=conv),
    ]


def test_recurrent_states_convert() -> None:
    pairs, kinds = list(permutations(PLAIN, 2)), range(len(states("bf16", "bf16", "TR")))
    for kind, number in product(kinds, range(len(pairs)) if DEEP else (None,)):
        src, dst = pairs[kind % len(pairs) if number is None else number]
        one, two = states(src, src, "TR")[kind], states(dst, dst, "RT")[kind]
        assert_converts(pair_of(one, two, ends=({"tp": 2}, {})))


def test_a_hybrid_converts_rows_and_states_and_copies_the_rest() -> None:
    """Attention in fp8 and a state in bf16 become bf16 and fp32; the convolution stays."""
    for split in ("auto", "shared"):
        ends = []
        for cache, state, ask in (
            ("fp8", "bf16", {"tp": 2, "layout": "BLHNC"}),
            ("bf16", "fp32", {"layout": "BHLNC"}),
        ):
            layers = [{"mixer": states(state, "bf16", "TR")[1]}] * 2
            model = model_of("hybrid", *layers, {"attn": attention(cache)}, heads=8)
            ends.append(small_plan(model, states=split, **ask))
        src, dst = ends
        assert conversion_of(src, dst) == "bf16->fp32, fp8->bf16"
        assert_converts(moving(src, dst, 40))


def test_there_and_back_stays_within_both_bounds() -> None:
    """bf16 into a format and out of it again: as far off as the two say together."""
    for name in ATTENTION[1:]:
        src, dst = (planned(attention(cache)) for cache in ("bf16", name))
        there, back = moving(src, dst, 20), moving(dst, src, 20, seed=1)
        back = replace(back, source_blocks=there.destination_blocks)
        rng = np.random.default_rng(7)
        memory, numbers = fill_sources(there, rng)
        poison, between = carry_out(there, memory, rng)
        kept = assert_converted(there, numbers, poison, between)
        again = assert_converted(back, kept, *carry_out(back, between, rng))
        bound = row_error("bf16", name).outliers + row_error(name, "bf16").outliers
        for layer, part in product(numbers, "kv"):
            off = again[layer][part] - numbers[layer][part]
            size = np.linalg.norm(numbers[layer][part], axis=-1)
            assert (np.linalg.norm(off, axis=-1) <= bound * size).all()


@given(st.data())
@settings(max_examples=max(1, settings().max_examples // 60))
def test_any_two_plans_convert(data: st.DataObject) -> None:
    """Any kind, order, block size, ranks and packing, in formats drawn for each end."""
    kind = data.draw(st.sampled_from((*ATTENTION_KINDS, *LATENT_KINDS, *RECURRENT_KINDS)))
    model = data.draw(models(kind))
    ends = [data.draw(rewritten(model)) for _ in range(2)]
    assume(any(a.spec != b.spec for a, b in zip(*(e.layers for e in ends), strict=True)))
    src, dst = (data.draw(drawn_plan(end, 96)) for end in ends)
    assume(conversion_of(src, dst))
    stop = data.draw(st.integers(1, 96))
    start = data.draw(st.integers(0, stop - 1) | st.just(0))
    assert_converts(moving(src, dst, (start, stop), seed=data.draw(st.integers(0, 9))))


@st.composite
def rewritten(draw: st.DrawFn, model: Model) -> Model:
    """The same model with its content in other formats."""
    state, conv = draw(st.sampled_from(PLAIN)), draw(st.sampled_from(PLAIN))
    rows = draw(st.sampled_from(ATTENTION))
    latents = draw(st.sampled_from(("bf16", "fp32", "fp8")))
    index = draw(st.sampled_from(("fp8", "mxfp4")))

    def other(spec: Any) -> Any:
        if isinstance(spec, LatentAttention):
            changed: dict[str, Any] = {"cache": "auto", **written(latents)}
        elif isinstance(spec, Indexer):
            changed = {"cache": index}
        elif hasattr(spec, "packing"):
            changed = {"cache": "auto", "head_dim": 64, "v_dim": None, **written(rows)}
        else:
            fields = {"ssm_dtype": state, "conv_dtype": conv, "shift_dtype": conv, "dtype": state}
            changed = {name: dtype for name, dtype in fields.items() if hasattr(spec, name)}
        return msgspec.structs.replace(spec, **changed)

    layers = tuple(msgspec.structs.replace(layer, spec=other(layer.spec)) for layer in model.layers)
    return msgspec.structs.replace(model, layers=layers)


# -- what is refused ------------------------------------------------------------------------------


def refused(code: Code, src: Plan, dst: Plan, says: str = "", **ask: Any) -> None:
    with pytest.raises(AtlasError) as refusal:
        route(src, dst, **ask)
    assert refusal.value.code is code, refusal.value
    assert says in str(refusal.value)


def test_nothing_is_converted_that_was_not_asked_for() -> None:
    src, dst = (planned(attention(cache)) for cache in ("bf16", "int8_per_token_head"))
    named = "bf16->int8_per_token_head"
    refused(Code.UNLIKE_DTYPES, src, dst, f"convert='{named}'")
    refused(Code.BAD_CONVERSION, dst, src, convert=named)
    refused(Code.BAD_CONVERSION, src, dst, named, convert="bf16->fp8")
    refused(Code.BAD_CONVERSION, src, dst, convert=f"{named}, fp32->bf16")
    refused(Code.BAD_CONVERSION, src, src, "Omit convert=", convert=named)
    for nonsense in ("", "bf16", "bf16->int8->fp8", 8, "x" * 999, "->", ","):
        with pytest.raises(AtlasError):
            route(src, dst, convert=nonsense)  # type: ignore[arg-type]
    made = route(src, dst, convert="bfloat16 -> int8")
    blocks: dict[str, Any] = {"source_blocks": [0], "destination_blocks": [0], "tokens": 16}
    for plain in (made.bind, made.stream, made.prepare):
        with pytest.raises(AtlasError) as refusal:
            plain(source_rank=0, destination_rank=0, **({} if plain == made.prepare else blocks))
        assert refusal.value.code is Code.BAD_CONVERSION
    with pytest.raises(AtlasError):
        route(src, src).converted(source_rank=0, destination_rank=0, **blocks)


def test_unlike_models_do_not_convert() -> None:
    src, dst = (planned(attention("bf16", head_dim=d)) for d in (64, 128))
    refused(Code.UNLIKE_LAYERS, src, dst, convert="bf16->fp16")


def test_scales_of_tensors_come_from_their_own_end() -> None:
    plain, fp8, nvfp4 = (planned(attention(cache)) for cache in ("bf16", "fp8", "nvfp4"))
    refused(Code.MISSING_SCALES, plain, fp8, "destination_scales", convert="bf16->fp8")
    refused(Code.MISSING_SCALES, plain, fp8, convert="bf16->fp8", source_scales=1.0)
    refused(
        Code.MISSING_SCALES,
        fp8,
        plain,
        "source_scales",
        convert="fp8->bf16",
        destination_scales=1.0,
    )
    refused(Code.MISSING_SCALES, plain, nvfp4, convert="bf16->nvfp4")
    layer = plain.layers[0]
    refused(Code.UNKNOWN_LAYER, plain, fp8, convert="bf16->fp8", destination_scales={"other": 1.0})
    wrong: list[Any] = [0, -1.0, float("nan"), float("inf"), 10**400, 1.1e30, "1", True, None]
    wrong += [1e-45, 1e-40, 2.9e-39, 1.17e-38, (1.0,), (1.0, 2.0, 3.0), (1.0, 1e-40), (1e-40, 1.0)]
    for scale in wrong:
        refused(Code.BAD_SIZE, plain, fp8, convert="bf16->fp8", destination_scales={layer: scale})
        refused(Code.BAD_SIZE, fp8, plain, convert="fp8->bf16", source_scales={layer: scale})
    for scale in (SMALLEST_SCALE, LARGEST_SCALE):
        assert 0 < np.float32(1) / np.float32(scale) < np.inf
        assert route(plain, fp8, convert="bf16->fp8", destination_scales={layer: scale}).conversion
    refused(Code.MISSING_SCALES, plain, fp8, convert="bf16->fp8", destination_scales={})
    assert route(plain, fp8, convert="bf16->fp8", destination_scales={layer: (0.5, 2)}).conversion


def test_scales_of_a_layer_that_is_copied_are_equal() -> None:
    """Bytes that are copied unchanged have another value if the destination has another scale."""
    kept, mixed = planned(attention("fp8")), planned(attention("fp8"), attention("bf16"))
    whole = planned(attention("fp8"), attention("fp8"))
    asked: list[tuple[Plan, Plan, dict[str, Any]]] = [
        (kept, kept, {}),
        (mixed, whole, {"convert": "bf16->fp8"}),
    ]
    for src, dst, named in asked:
        for scales in ((1.0, 2.0), (1.0, (1.0, 2.0))):
            ask = dict(zip(("source_scales", "destination_scales"), scales, strict=True))
            refused(Code.BAD_CONVERSION, src, dst, "must have equal", **ask, **named)
        equal: dict[str, Any] = dict.fromkeys(("source_scales", "destination_scales"), (1.0, 2.0))
        made = route(src, dst, **named, **equal)
        assert (made.conversion is not None) == bool(named)
    assert route(mixed, whole, convert="bf16->fp8", destination_scales=2.0).conversion


def test_a_rotation_that_only_an_engine_knows_is_not_converted() -> None:
    name = "turboquant_4bit_nc"
    odd = [attention(cache, head_dim=96) for cache in ("bf16", name)]
    src, dst = (planned(spec) for spec in odd)
    refused(Code.CANNOT_CONVERT, src, dst, "power of two", convert=f"bf16->{name}")
    spec = attention(name)
    model = stacked("model", spec)
    kv = np.zeros((8, 16, 2, spec.page(16).content), np.uint8)
    engine = foreign(model, {model.layers[0].name: Placement.from_tensor(kv, axes="BNHC")})
    plain = planned(attention("bf16"))
    refused(Code.CANNOT_CONVERT, engine, plain, "only the engine has", convert=f"{name}->bf16")


def test_the_smaller_format_travels() -> None:
    src, dst = (planned(attention(cache)) for cache in ("bf16", "fp8"))
    for one, two, at, ask in (
        (src, dst, "source", {"destination_scales": 1.0}),
        (dst, src, "destination", {"source_scales": 1.0}),
    ):
        made = route(one, two, convert=conversion_of(one, two), **ask)  # type: ignore[arg-type]
        assert made.conversion is not None
        (change,) = made.conversion.changes
        assert (change.at, change.way, change.layers) == (at, "elements", 1)
        stream = made.converted(
            source_rank=0, destination_rank=0, source_blocks=[0], destination_blocks=[0], tokens=16
        )
        assert stream.nbytes == 16 * 2 * 128
        assert stream.arriving == stream.nbytes * (2 if at == "destination" else 1)
        with pytest.raises(AtlasError):
            list(stream.parts(1, 128))
        with pytest.raises(AtlasError):
            list(stream.spans(100))


def test_check_shows_the_conversion() -> None:
    src, dst = (plan("Qwen3-8B", memory="8GiB", kv_dtype=d, max_len=512) for d in ("bf16", INT8))
    assert [reason.code for reason in check(src, dst).reasons] == [Code.UNLIKE_DTYPES]
    answer = check(src, dst, tokens=64, convert="bf16->int8")
    assert answer.ok
    told = answer.as_dict()
    assert told["conversion"] == [
        {
            "from": "bf16", "to": "int8_per_token_head", "layers": 36, "way": "rows",
            "at": "source", "error": 0.012, "error_with_outliers": 0.04,
        }
    ]  # fmt: skip
    assert told["bytes"] == 64 * 36 * 8 * 2 * 132
    wrong = check(src, dst, convert="bf16->fp8")
    assert [reason.code for reason in wrong.reasons] == [Code.BAD_CONVERSION]
