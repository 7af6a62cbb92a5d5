"""Every dtype to the bit, against ml_dtypes and numpy."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas import AtlasError, Code, DType
from kvatlas.geometry import ALL_DTYPES
from tests.cases import each

PEERS: dict[str, Any] = {
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "nvfp4": ml_dtypes.float4_e2m1fn,
    "mxfp4": ml_dtypes.float4_e2m1fn,
    "ue8m0": ml_dtypes.float8_e8m0fnu,
    "int8": np.int8,
    "uint8": np.uint8,
    "int4": ml_dtypes.int4,
    "uint4": ml_dtypes.uint4,
}

BITS = {
    "fp32": 32, "bf16": 16, "fp16": 16, "e4m3": 8, "e5m2": 8, "ue8m0": 8, "int8": 8, "uint8": 8,
    "e2m1": 4, "nvfp4": 4, "mxfp4": 4, "int4": 4, "uint4": 4, "uint3": 3,
}  # fmt: skip


def peer_values(name: str, codes: np.ndarray[Any, Any]) -> list[float]:
    peer = np.dtype(PEERS[name])
    if BITS[name] < 8 and np.issubdtype(codes.dtype, np.integer) and "int" in name:
        signed = name == "int4"
        return [float(c - 16 if signed and c >= 8 else c) for c in codes.tolist()]
    raw = codes.astype({1: np.uint8, 2: np.uint16, 4: np.uint32}[peer.itemsize])
    with np.errstate(invalid="ignore"):
        return [float(x) for x in raw.view(peer).astype(np.float64)]


def same(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or (
        a == b and math.copysign(1, a) == math.copysign(1, b)
    )


def test_every_dtype_is_known_here() -> None:
    assert {dtype.name: dtype.bits for dtype in ALL_DTYPES} == BITS


@each([name for name in PEERS if BITS[name] <= 16])
def test_every_code_stands_for_the_peers_number(name: str) -> None:
    codes = np.arange(1 << BITS[name])
    ours = [DType.of(name).decode(code) for code in codes.tolist()]
    assert all(same(a, b) for a, b in zip(ours, peer_values(name, codes), strict=True))


@given(st.integers(0, 2**32 - 1))
def test_fp32_codes(code: int) -> None:
    assert same(DType.of("fp32").decode(code), peer_values("fp32", np.array([code]))[0])


@each([d for d in ALL_DTYPES if d.bits <= 8])
def test_representable_numbers_round_trip(dtype: DType) -> None:
    for code in range(1 << dtype.bits):
        value = dtype.decode(code)
        if math.isfinite(value):
            assert dtype.decode(dtype.encode(value)) == value
            assert dtype.encode(value) == code


@given(st.floats(-400, 400, allow_nan=False, width=32))
def test_encode_rounds_to_the_nearest_as_the_peer_does(value: float) -> None:
    for name in ["bf16", "fp16", "e4m3", "e5m2", "e2m1"]:
        largest = {"e2m1": 6.0}.get(name, 448.0)
        near = max(-largest, min(largest, value))
        theirs = np.float64(near).astype(PEERS[name]).astype(np.float64)
        assert same(DType.of(name).decode(DType.of(name).encode(near)), float(theirs)), name


def test_past_the_largest_it_saturates() -> None:
    assert DType.of("e4m3").decode(DType.of("e4m3").encode(1e9)) == 448.0
    assert DType.of("e2m1").decode(DType.of("e2m1").encode(-math.inf)) == -6.0
    assert DType.of("int4").decode(DType.of("int4").encode(-99)) == -8.0
    assert DType.of("int8").decode(DType.of("int8").encode(math.inf)) == 127.0
    assert DType.of("uint4").encode(-3.0) == 0


def test_nan_where_there_is_one_and_a_refusal_where_not() -> None:
    for name in ("fp32", "bf16", "fp16", "e4m3", "e5m2", "ue8m0"):
        assert math.isnan(DType.of(name).decode(DType.of(name).encode(math.nan)))
    for name in ("int8", "int4", "e2m1", "nvfp4", "uint3"):
        with pytest.raises(AtlasError) as refusal:
            DType.of(name).encode(math.nan)
        assert refusal.value.code is Code.NOT_REPRESENTABLE


@each(
    [
        ("fp32", 3, 12), ("bf16", 128, 256), ("fp16", 1, 2), ("e4m3", 128, 128), ("e5m2", 5, 5),
        ("int8", 7, 7), ("int4", 128, 64), ("int4", 3, 2), ("nvfp4", 128, 64), ("mxfp4", 128, 64),
        ("e2m1", 1, 1), ("ue8m0", 7, 7), ("uint3", 128, 48), ("uint3", 96, 36), ("uint3", 1, 1),
        ("uint4", 128, 64), ("uint8", 9, 9),
    ],
)  # fmt: skip
def test_storage_fills_up_the_last_byte(name: str, elements: int, nbytes: int) -> None:
    assert DType.of(name).storage(elements) == nbytes


def test_block_scales() -> None:
    nvfp4, mxfp4 = DType.of("nvfp4"), DType.of("mxfp4")
    assert (nvfp4.scales(128), nvfp4.scale) == (8, "e4m3")
    assert (mxfp4.scales(128), mxfp4.scale) == (4, "ue8m0")
    assert DType.of("e4m3").scales(128) == 0


def test_spellings_of_torch_numpy_and_configs() -> None:
    torch = pytest.importorskip("torch")
    for spelling, name in {
        torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32",
        torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8",
        torch.uint8: "uint8", np.dtype("float16"): "fp16", "half": "fp16", "BFloat16": "bf16",
    }.items():  # fmt: skip
        assert DType.of(spelling).name == name


@each(["float3", "", None, 16])
def test_an_unknown_dtype_is_refused(name: object) -> None:
    with pytest.raises(AtlasError) as refusal:
        DType.of(name)
    assert refusal.value.code is Code.UNKNOWN_DTYPE


def test_a_code_with_too_many_bits_is_refused() -> None:
    with pytest.raises(AtlasError) as refusal:
        DType.of("int4").decode(16)
    assert refusal.value.code is Code.OUT_OF_RANGE
