"""Bad input: a stable code, and a message with the rule, the value and the remedy."""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvatlas import AtlasError, Code, DType, Field, Layout, Page, Placement, validate
from kvatlas.errors import LONGEST_TEXT
from kvatlas.geometry import (
    FieldAxis,
    Section,
    Sharding,
    StateBlocks,
    StateSpans,
    StridedRuns,
    fold_together,
)
from kvatlas.planning import Plan
from kvatlas.specs import (
    AnySpec,
    CellFormat,
    FullAttention,
    Indexer,
    LatentAttention,
    Mamba2,
    ShortConv,
    SlidingAttention,
)
from kvatlas.specs.cell_formats import format_name
from tests.cases import each

P = Placement.packed([("B", 4), ("H", 2), ("N", 3)], item=8)
HUGE = 2**62
BYTE = DType.of("uint8")
NVFP4: dict[str, Any] = {"heads": 1, "cache": "nvfp4"}
PLANES: dict[str, Any] = {"scales": "planes"}
PRIMES = (1000003, 1000033, 1000037, 1000039, 1000081)
INT8: dict[str, Any] = {"cache": "int8_per_token_head"}
TWO: dict[str, Any] = {"pages": 2, "blocks": 2}
DENSE = FullAttention(heads=2, head_dim=16).page(4)
CELL = (FieldAxis("C", 8, "C"),)

REFUSALS: list[tuple[Code, Callable[[], Any]]] = [
    (Code.UNLIKE_PLACEMENTS, lambda: StridedRuns.between(P, P.rename(H="R"))),
    (Code.UNLIKE_PLACEMENTS, lambda: StridedRuns.between(P, P.narrow("H", 0, 1))),
    (Code.BAD_SIZE, lambda: StateBlocks(4, every=2, residue=2).overlaps(StateBlocks(4))),
    (Code.BAD_SIZE, lambda: StateSpans.between(0, 8, StateBlocks(0), StateBlocks(4))),
    (Code.UNKNOWN_AXIS, lambda: P.size("X")),
    (Code.UNKNOWN_AXIS, lambda: P(B=0, H=0, Q=0)),
    (Code.UNKNOWN_AXIS, lambda: P.narrow("C", 0, 1)),
    (Code.UNKNOWN_AXIS, lambda: P.descriptors("L")),
    (Code.UNKNOWN_AXIS, lambda: P.runs(L=[0])),
    (Code.UNKNOWN_AXIS, lambda: P.rename(L="l")),
    (Code.UNKNOWN_AXIS, lambda: Layout("LBNHC").outside("X", "L")),
    (Code.UNKNOWN_AXIS, lambda: Layout("LBNHC").place(L=1, B=1, H=1, N=1)),
    (Code.UNKNOWN_AXIS, lambda: Layout("LBNHC").place(L=1, B=1, H=1, N=1, C=1, strides={"X": 1})),
    (Code.BAD_AXES, lambda: Placement(("B", "B"), (2, 2), (2, 1))),
    (Code.BAD_AXES, lambda: Placement(("B", 1), (2, 2), (2, 1))),  # type: ignore[arg-type]
    (Code.BAD_AXES, lambda: Placement(("B",), (2, 2), (2, 1))),
    (Code.BAD_AXES, lambda: P.reorder("B", "H")),
    (Code.BAD_AXES, lambda: P.reorder("B", "H", "H")),
    (Code.BAD_AXES, lambda: P.split("N", into=("B", "n"), inner=3)),
    (Code.BAD_AXES, lambda: P.descriptors("B", "B")),
    (Code.BAD_AXES, lambda: P(B=1, H=1)),
    (Code.BAD_AXES, lambda: P.split("N", into="n", inner=3)),  # type: ignore[arg-type]
    (Code.BAD_AXES, lambda: Placement.packed("BN")),  # type: ignore[arg-type]
    (Code.BAD_AXES, lambda: Placement.packed(["BN", "B4"])),  # type: ignore[list-item]
    (Code.BAD_AXES, lambda: validate({"a": (0, 8)}, size=8)),  # type: ignore[dict-item]
    (Code.BAD_ORDER, lambda: Layout("LBNH")),
    (Code.BAD_ORDER, lambda: Layout("LBNHCC")),
    (Code.NOT_AN_INTEGER, lambda: Placement(("B",), (2.0,), (1,))),  # type: ignore[arg-type]
    (Code.NOT_AN_INTEGER, lambda: Placement(("B",), (math.nan,), (1,))),  # type: ignore[arg-type]
    (Code.NOT_AN_INTEGER, lambda: Placement(("B",), (2,), (1.5,))),  # type: ignore[arg-type]
    (Code.NOT_AN_INTEGER, lambda: Placement(("B",), (True,), (1,))),
    (Code.NOT_AN_INTEGER, lambda: Placement(("B",), ("2",), (1,))),  # type: ignore[arg-type]
    (Code.NOT_AN_INTEGER, lambda: Layout("LBNHC").place(L=1, B=1, H=1, N=16.0, C=8)),
    (Code.NOT_AN_INTEGER, lambda: Layout("LBNHC").place(L=1, B=1, H=1, N=Fraction(3), C=8)),
    (Code.NOT_AN_INTEGER, lambda: P(B=0.5, H=0, N=0)),
    (Code.NOT_AN_INTEGER, lambda: P.select("B", 1.0)),  # type: ignore[arg-type]
    (Code.NOT_AN_INTEGER, lambda: P.descriptors(B=np.array([0.0, 1.0]))),
    (Code.NOT_AN_INTEGER, lambda: FullAttention(heads=8.0, head_dim=64)),  # type: ignore[arg-type]
    (Code.BAD_SIZE, lambda: Placement(("B",), (0,), (1,))),
    (Code.BAD_SIZE, lambda: Placement(("B",), (-2,), (1,))),
    (Code.BAD_SIZE, lambda: Placement((), (), (), item=0)),
    (Code.BAD_SIZE, lambda: P.narrow("B", 0, 0)),
    (Code.BAD_SIZE, lambda: P.split("N", into=("a", "b"), inner=0)),
    (Code.BAD_SIZE, lambda: FullAttention(heads=0, head_dim=64)),
    (Code.BAD_SIZE, lambda: SlidingAttention(heads=1, head_dim=64, window=-1)),
    (Code.BAD_SIZE, lambda: FullAttention(heads=1, head_dim=64).page(0)),
    (Code.BAD_SIZE, lambda: Section(0)),
    (Code.BAD_SIZE, lambda: validate({}, size=0)),
    (Code.BAD_SIZE, lambda: Page(0, 1, 8, ())),
    (Code.NEGATIVE, lambda: Placement(("B",), (2,), (-8,))),
    (Code.NEGATIVE, lambda: Placement(("B",), (2,), (8,), offset=-1)),
    (Code.NEGATIVE, lambda: P.shift(-1)),
    (Code.NEGATIVE, lambda: P.descriptors(base=-1)),
    (Code.NEGATIVE, lambda: Placement.from_tensor(np.zeros(4)[::-1], axes="B")),
    (Code.OVERFLOW, lambda: Placement(("B",), (2**63,), (1,))),
    (Code.OVERFLOW, lambda: Placement(("B", "N"), (4, 4), (HUGE, 1))),
    (Code.OVERFLOW, lambda: Layout("LBNHC").place(L=HUGE, B=HUGE, H=1, N=1, C=1)),
    (Code.OVERFLOW, lambda: P.descriptors(base=2**63 - 10)),
    (Code.OUT_OF_RANGE, lambda: P(B=4, H=0, N=0)),
    (Code.OUT_OF_RANGE, lambda: P(B=-1, H=0, N=0)),
    (Code.OUT_OF_RANGE, lambda: P.select("B", 4)),
    (Code.OUT_OF_RANGE, lambda: P.narrow("B", 2, 3)),
    (Code.OUT_OF_RANGE, lambda: P.narrow("B", -1, 2)),
    (Code.OUT_OF_RANGE, lambda: P.descriptors(B=[0, 4])),
    (Code.OUT_OF_RANGE, lambda: P.runs(B=np.array([-1]))),
    (Code.OUT_OF_BOUNDS, lambda: P.view(np.zeros(10, np.uint8))),
    (Code.OVERLAP, lambda: Placement(("B", "N"), (2, 4), (3, 1))),
    (Code.OVERLAP, lambda: Placement(("B",), (2,), (0,))),
    (Code.OVERLAP, lambda: validate({"a": P, "b": P.shift(8)}, size=1000)),
    (Code.HOLE, lambda: validate({"a": P}, size=1000)),
    (Code.MISALIGNED, lambda: validate({"a": P}, size=P.nbytes, align=7)),
    (Code.NOT_DIVISIBLE, lambda: P.split("N", into=("a", "b"), inner=2)),
    (Code.NOT_DIVISIBLE, lambda: LatentAttention(compress=4).page(10)),
    (Code.NOT_FOLDABLE, lambda: P.fold("N", "B")),
    (Code.NOT_FOLDABLE, lambda: P.fold("B", "B")),
    (Code.UNLIKE_PLACEMENTS, lambda: fold_together(P, P.narrow("B", 0, 2))),
    (Code.UNKNOWN_DTYPE, lambda: DType.of("float7")),
    (Code.UNKNOWN_DTYPE, lambda: FullAttention(heads=1, head_dim=8, dtype="tf32")),
    (Code.UNKNOWN_DTYPE, lambda: ShortConv(width=8, conv_dtype="tf32")),
    (Code.NOT_REPRESENTABLE, lambda: DType.of("int4").encode(math.nan)),
    (Code.UNKNOWN_FIELD, lambda: FullAttention(heads=1, head_dim=8).page(1).field("q")),
    (Code.BAD_FIELD, lambda: FieldAxis("H", 2, "L")),  # type: ignore[arg-type]
    (Code.BAD_FIELD, lambda: Field("a", BYTE, (*CELL, *CELL))),
    (Code.BAD_FIELD, lambda: Field("a", BYTE, "HN")),  # type: ignore[arg-type]
    (Code.BAD_FIELD, lambda: Field("a", BYTE, CELL, sharding=None)),  # type: ignore[arg-type]
    (Code.BAD_FIELD, lambda: Field("a", BYTE, CELL, ranges=(0, 8))),  # type: ignore[arg-type]
    (Code.BAD_FIELD, lambda: Page(1, 1, 8, ("k", "v"))),  # type: ignore[arg-type]
    (Code.UNKNOWN_FIELD, lambda: CellFormat(FullAttention(heads=1, head_dim=8)).row("q")),
    (Code.UNKNOWN_DTYPE, lambda: format_name(16)),  # type: ignore[arg-type]
    (Code.TOO_MANY, lambda: StateSpans.between(0, HUGE, StateBlocks(16), StateBlocks(16))),
    (Code.PAGE_TOO_SMALL, lambda: FullAttention(heads=1, head_dim=8).page(4).padded(100)),
    (
        Code.PADDING_INSIDE_PAGE,
        lambda: FullAttention(heads=2, head_dim=8).page(4).padded(999).place(
            Layout("BHLNC"), pages=2, blocks=2
        ),
    ),
    (Code.BAD_TENSOR, lambda: Placement.from_tensor("cache", axes="B")),
    (Code.BAD_TENSOR, lambda: P.view(np.zeros(999, np.int8))),
    (Code.BAD_RANK, lambda: Sharding.by_heads(4).ranges(2, 2)),
    (Code.TP_HEADS, lambda: FullAttention(heads=10, head_dim=128).page(16, tp=4)),
    (Code.TP_WHOLE, lambda: Sharding.whole().ranges(2, 0)),
    (Code.BAD_SPEC, lambda: FullAttention(heads=1, head_dim=8, cache="fp7")),
    (Code.BAD_SPEC, lambda: FullAttention(**NVFP4, head_dim=24)),
    (Code.BAD_SPEC, lambda: FullAttention(heads=1, head_dim=8, v_dim=4, packing="planes")),
    (Code.BAD_SPEC, lambda: LatentAttention(cache="nvfp4")),
    (Code.BAD_SPEC, lambda: LatentAttention(latent=500, cache="fp8_ds_mla")),
    (Code.BAD_SPEC, lambda: Indexer(head_dim=100)),
    (Code.BAD_SPEC, lambda: ShortConv(width=8, kernel=1)),
    (Code.NEGATIVE, lambda: Mamba2(heads=1, head_dim=1, groups=1, state_size=1, speculative=-1)),
    (Code.BAD_SPEC, lambda: FullAttention(heads=1, head_dim=8, packing="sideways")),  # type: ignore[arg-type]
    (Code.BAD_SPEC, lambda: FullAttention(heads=1, head_dim=16, **PLANES)),
    (Code.BAD_SPEC, lambda: ShortConv(width=8, conv_order="SD")),  # type: ignore[arg-type]
    (Code.BAD_SPEC, lambda: Indexer(cache="fp7")),  # type: ignore[arg-type]
    (Code.BAD_SPEC, lambda: FullAttention(heads=1, head_dim=8, dtype="nvfp4")),
    (Code.BAD_SPEC, lambda: ShortConv(width=8, conv_dtype="int4")),
    (Code.BAD_SPEC, lambda: FullAttention(heads=1, head_dim=7, cache="int4_per_token_head")),
    (Code.BAD_SIZE, lambda: LatentAttention(align=0)),
    (Code.MISALIGNED, lambda: FullAttention(heads=1, head_dim=6, **INT8).page(1)),
    (Code.UNDECIDED, lambda: Placement(tuple("abcde"), (997,) * 5, PRIMES)),
    (Code.TOO_MANY, lambda: Placement(("B",), (2**40,), (16,)).runs()),
    (Code.TOO_MANY, lambda: Placement(("B",), (2**40,), (16,), item=8).descriptors("B")),
    (Code.HOLE, lambda: validate({}, size=8)),
    (Code.HOLE, lambda: Page(1, 1, 8, ())),
    (Code.BAD_AXES, lambda: fold_together()),
    (Code.BAD_AXES, lambda: Placement(("self",), (2,), (8,))),
    (Code.BAD_AXES, lambda: Placement.packed([("B", 2)], strides={"X": 64})),
    (Code.BAD_ORDER, lambda: Layout(["L"])),  # type: ignore[arg-type]
    (Code.BAD_SIZE, lambda: Section(2).deal(0, 0)),
    (Code.NOT_AN_INTEGER, lambda: ShortConv(width=8, kernel="4")),  # type: ignore[arg-type]
    (Code.BAD_TENSOR, lambda: P.view(bytearray(999))),  # type: ignore[arg-type]
    (Code.UNKNOWN_DTYPE, lambda: DType("fp12", 12, "float", 5, 6)),
    (Code.UNLIKE_PLACEMENTS, lambda: DENSE.view(DENSE.place("LBHNC", **TWO).folded(), "k")),
    (Code.PAGE_TOO_SMALL, lambda: DENSE.padded(999).place("BLHNC", **TWO, page_stride=512)),
    (Code.PADDING_INSIDE_PAGE, lambda: DENSE.padded(999).place("BHLNC", **TWO, page_stride=999)),
]  # fmt: skip


@each(REFUSALS)
def test_bad_input_is_refused_with_its_code(code: Code, act: Callable[[], Any]) -> None:
    with pytest.raises(AtlasError) as refusal:
        act()
    error = refusal.value
    assert error.code is code
    assert str(error).startswith(f"{error.problem}. Got {error.got}. {error.hint}")
    assert str(error).endswith(f" [{code}]")
    assert error.problem
    assert str(error.got)
    assert error.hint


def test_every_code_has_a_way_to_it() -> None:
    elsewhere = {Code.NO_CACHE, Code.NOT_CONTIGUOUS, Code.SPLIT_ELEMENT}
    elsewhere |= {  # tests/models/test_bad_input.py
        Code.UNREADABLE, Code.BAD_CONFIG, Code.MISSING_KEY, Code.UNKNOWN_ARCHITECTURE,
        Code.UNKNOWN_MODEL, Code.NO_HUB, Code.UNKNOWN_ENGINE,
    }  # fmt: skip
    elsewhere.add(Code.CONCURRENT_CALLS)  # tests/pool/test_block_pool.py
    elsewhere |= {Code.UNKNOWN_GPU, Code.WEIGHTS_TOO_LARGE}  # tests/models/test_gpus.py
    elsewhere |= {  # tests/planning/test_refusals.py
        Code.UNKNOWN_BACKEND, Code.BACKEND_REFUSES, Code.BAD_TOPOLOGY, Code.LAYOUT_REFUSED,
        Code.PAGES_NOT_UNIFIED, Code.NOT_ENOUGH_MEMORY, Code.BAD_PACK, Code.BAD_PLAN,
        Code.UNKNOWN_POLICY, Code.UNKNOWN_LAYER, Code.BAD_QUANTITY, Code.CONTRADICTORY,
    }  # fmt: skip
    elsewhere |= {  # tests/routing/test_refusals.py
        Code.UNLIKE_MODELS, Code.UNLIKE_LAYERS, Code.UNLIKE_DTYPES, Code.MISSING_LAYERS,
        Code.NOT_A_SOURCE, Code.BAD_TOKENS, Code.MISSING_BLOCKS, Code.TWICE,
    }  # fmt: skip
    elsewhere |= {  # tests/routing/test_conversion.py, tests/wire/test_conversion.py
        Code.BAD_CONVERSION, Code.CANNOT_CONVERT, Code.MISSING_SCALES, Code.UNLIKE_CONVERSIONS,
    }  # fmt: skip
    elsewhere |= {  # tests/wire
        Code.DEADLINE, Code.PEER_LOST, Code.WIRE_FAILED, Code.BAD_HANDSHAKE, Code.BAD_SIGNATURE,
        Code.UNLIKE_VERSIONS, Code.UNKNOWN_SESSION, Code.UNKNOWN_REQUEST, Code.LEASE_EXPIRED,
        Code.BUFFERS_RECLAIMED, Code.BLOCKS_IN_USE, Code.DIFFERENT_IDENTITY,
        Code.CHECKSUM, Code.CANCELLED, Code.MISSING_EXTRA, Code.BAD_SECRET, Code.UNPROTECTED,
        Code.BUSY, Code.TOO_MANY_FILES, Code.FORBIDDEN,
    }  # fmt: skip
    elsewhere |= {  # tests/engines/test_cache.py
        Code.NO_BLOCKS, Code.ENGINE_REFUSES, Code.CANNOT_TAKE_BACK,
    }  # fmt: skip
    elsewhere |= {Code.BAD_EXCHANGE, Code.NOT_CANONICAL}  # tests/planning/exchange
    elsewhere |= {Code.FIELDS_APART}  # tests/planning/test_foreign_fields.py
    elsewhere |= {Code.BAD_TRACE}  # tests/simulate
    elsewhere |= {Code.ROW_UNREADABLE}  # tests/tier/test_encrypted_store.py
    elsewhere |= {Code.UNWRITABLE}  # tests/maps/test_map.py
    elsewhere |= {Code.WRONG_DEVICE, Code.NO_KERNEL}  # tests/kernels/triton/test_refusals.py
    assert {code for code, _ in REFUSALS} | elsewhere == set(Code)


def test_every_code_is_documented() -> None:
    page = (Path(__file__).parents[1] / "docs/reference/errors.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE)
    assert rows == [(str(code), code.problem) for code in Code]


def test_a_refusal_is_a_value_error_and_survives_pickling() -> None:
    error = AtlasError(Code.HOLE, "rule", got=1, hint="do this")
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert isinstance(error, ValueError)
    assert (again.code, str(again)) == (Code.HOLE, str(error))


@each(
    [
        b'{"kind": "full_attention", "heads": -1, "head_dim": 64}',
        b'{"kind": "full_attention", "heads": 1, "head_dim": 64, "more": 1}',
        b'{"kind": "full_attention", "heads": 1.5, "head_dim": 64}',
        b'{"kind": "no_such_kind"}',
        b'{"kind": "mamba2", "heads": 4, "head_dim": 2, "groups": 0, "state_size": 3}',
        b'{"kind": "full_attention", "heads": 1, "head_dim": 99999999999999999999}',
        b'{"kind": "full_attention", "heads": 1, "head_dim": 64, "packing": "sideways"}',
    ],
)
def test_specs_from_outside_are_checked_when_read(text: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=AnySpec)


def test_what_was_got_is_cut_to_a_readable_length() -> None:
    long = "x" * 10_000_000
    error = AtlasError(Code.BAD_PLAN, long, got=long, hint=long)
    assert len(str(error)) < 4 * LONGEST_TEXT
    assert "10,000,000 characters" in str(error.got)
    assert AtlasError(Code.BAD_PLAN, got=[1, 2], hint="x").got == [1, 2]
    with pytest.raises(AtlasError) as refusal:
        Plan.from_json(json.dumps({"k" * 1_000_000: 1}))
    assert len(str(refusal.value)) < 4 * LONGEST_TEXT
