"""Formats by their definitions, in float64: what a converted row must be.

Nothing here knows of the codecs or of routes. A row of numbers becomes the bytes of each field
of a cell, and bytes become numbers again, from tables of what bit patterns stand for.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvatlas.specs import (
    Attention,
    CompressorState,
    Indexer,
    LatentAttention,
    Spec,
    content_formats,
)

Floats = Any
Bytes = Any
Fields = dict[str, Bytes]
"""Bytes [..., items, bytes of an item] by field."""

LEAST, TINY, HALF = 1e-6, 1e-12, 65504.0


# -- bit patterns -------------------------------------------------------------------------------


@cache
def pattern_values(exponent: int, mantissa: int, specials: str) -> Floats:
    """Every non-negative number of a small float, by its code; NaN and infinity left out."""
    bias, found = (1 << (exponent - 1)) - 1, []
    for code in range(1 << (exponent + mantissa)):
        e, m = code >> mantissa, code & ((1 << mantissa) - 1)
        top = e == (1 << exponent) - 1
        if top and (specials == "ieee" or (specials == "nan" and m == (1 << mantissa) - 1)):
            break
        number = m / (1 << mantissa) + (1 if e else 0)
        found.append(math.ldexp(number, (e or 1) - bias))
    return np.array(found)


FLOATS = {
    "e4m3": (4, 3, "nan"), "e5m2": (5, 2, "ieee"), "e2m1": (2, 1, "none"),
    "bf16": (8, 7, "ieee"), "fp16": (5, 10, "ieee"),
}  # fmt: skip


def to_code(values: Floats, kind: str) -> Any:
    """The nearest code, ties to the even one; what is too large saturates."""
    table = pattern_values(*FLOATS[kind])
    size = np.abs(values)
    above = np.clip(np.searchsorted(table, size), 1, len(table) - 1)
    up, down = table[above] - size, size - table[above - 1]
    even = np.where(above % 2 == 0, above, above - 1)
    code = np.where(up < down, above, np.where(up > down, above - 1, even))
    bits = sum(FLOATS[kind][:2])
    return code | (np.signbit(values).astype(np.int64) << bits)


def from_code(codes: NDArray[Any], kind: str) -> Floats:
    table = pattern_values(*FLOATS[kind])
    bits = sum(FLOATS[kind][:2])
    codes = codes.astype(np.int64)
    return np.where(codes >> bits, -1.0, 1.0) * table[codes & ((1 << bits) - 1)]


def store(values: Floats, kind: str) -> Bytes:
    """Numbers [..., n] of a plain type as bytes [..., n, item]."""
    if kind == "fp32":
        data: NDArray[Any] = values.astype("<f4")
    elif kind == "int8":
        data = values.astype("i1")
    else:
        data = to_code(values, kind).astype("<u2" if kind in ("bf16", "fp16") else "u1")
    return np.ascontiguousarray(data)[..., None].view(np.uint8)


def load(data: Bytes, kind: str) -> Floats:
    data = np.ascontiguousarray(data)
    if kind == "fp32":
        return data.view("<f4")[..., 0].astype(np.float64)
    if kind == "int8":
        return data.view("i1")[..., 0].astype(np.float64)
    return from_code(data.view("<u2" if kind in ("bf16", "fp16") else "u1")[..., 0], kind)


def pack(codes: NDArray[Any], bits: int) -> Bytes:
    """Codes along the last axis, the first in the lowest bits."""
    stream = (codes[..., None].astype(np.int64) >> np.arange(bits)) & 1
    stream = stream.reshape(*codes.shape[:-1], -1)
    packed = np.packbits(stream.astype(np.uint8), axis=-1, bitorder="little")
    return packed[..., None]


def unpack(data: Bytes, bits: int, count: int) -> Any:
    stream = np.unpackbits(data[..., 0], axis=-1, bitorder="little")[..., : count * bits]
    stream = stream.reshape(*stream.shape[:-1], count, bits).astype(np.int64)
    return (stream << np.arange(bits)).sum(-1)


# -- rotations and levels ---------------------------------------------------------------------


@cache
def hadamard(size: int) -> Floats:
    made = np.ones((1, 1))
    while len(made) < size:
        made = np.block([[made, made], [made, -made]])
    return made


@cache
def signs(size: int) -> Floats:
    """Part of the format: drawn once, and never again."""
    generator = torch.Generator().manual_seed(0x9E3779B9)
    drawn = torch.full((size,), 0.5, dtype=torch.float32).bernoulli(generator=generator)
    return drawn.numpy().astype(np.float64) * 2 - 1


def rotate_signed(rows: Floats, *, back: bool = False) -> Floats:
    size = rows.shape[-1] & -rows.shape[-1]
    blocks = rows.reshape(*rows.shape[:-1], -1, size)
    turned = blocks @ hadamard(size) * signs(size) / size if back else None
    if turned is None:
        turned = (blocks * signs(size)) @ hadamard(size)
    return turned.reshape(rows.shape)


@cache
def levels(bits: int) -> Floats:
    """Lloyd's levels of a normal variable, by sums over a fine grid's cells in closed form."""
    found = np.linspace(-2, 2, 1 << bits)
    for _ in range(3000):
        edges = np.concatenate(([-np.inf], (found[1:] + found[:-1]) / 2, [np.inf]))
        density = np.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi)
        below = np.array([(1 + math.erf(x / math.sqrt(2))) / 2 for x in edges])
        found = (density[:-1] - density[1:]) / (below[1:] - below[:-1])
    return found


def away(values: Floats) -> Floats:
    return np.sign(values) * np.floor(np.abs(values) + 0.5)


def f4(values: Floats) -> Floats:
    return values.astype(np.float32).astype(np.float64)


def f2(values: Floats) -> Floats:
    return np.clip(values, -HALF, HALF).astype(np.float16).astype(np.float64)


def power_above(values: Floats) -> Floats:
    return np.ceil(np.log2(values))


# -- rows ---------------------------------------------------------------------------------------

TURBO = {
    "turboquant_k8v4": (8, 4), "turboquant_4bit_nc": (4, 4), "turboquant_k3v4_nc": (3, 4),
    "turboquant_3bit_nc": (3, 3),
}  # fmt: skip


def encode_side(name: str, side: str, rows: Floats, scale: float, before: str) -> Fields:
    """K or V [..., D]; `before` is the format that the rows were decoded from."""
    if name in ("bf16", "fp16", "fp32"):
        return {side: store(rows, name)}
    if name in ("fp8", "fp8_e5m2"):
        return {side: store(rows / scale, "e4m3" if name == "fp8" else "e5m2")}
    largest = np.abs(rows).max(-1, keepdims=True)
    if name == "int8_per_token_head":
        step = np.maximum(largest / 127, LEAST)
        codes = np.clip(away(rows / step), -128, 127)
        return {side: store(codes, "int8"), f"{side}_scale": store(step, "fp32")}
    if name == "fp8_per_token_head":
        step = np.maximum(largest / 448, LEAST)
        return {side: store(rows / step, "e4m3"), f"{side}_scale": store(step, "fp32")}
    if name == "int4_per_token_head":
        turned = rotate_signed(rows)
        # What comes from a model's dtype is rounded to it once more.
        turned = load(store(turned, before), before) if before in FLOATS else turned
        low = np.minimum(turned.min(-1, keepdims=True), 0)
        high = np.maximum(turned.max(-1, keepdims=True), 0)
        step = f4(np.maximum((high - low) / 15, LEAST))
        zero = np.clip(away(-low / step), 0, 15)
        codes = np.clip(away(turned / step + zero), 0, 15)
        word = step.astype("<f4").view("<u4") & np.uint32(0xFFFFFFF0) | zero.astype("<u4")
        return {side: pack(codes, 4), f"{side}_scale": word[..., None].view(np.uint8)}
    if name == "nvfp4":
        return dict(zip((side, f"{side}_scale"), _nvfp4(rows, scale), strict=True))
    width = TURBO[name][side == "v"]
    if width == 8:
        return {side: store(rows, "e4m3")}
    if side == "v":
        low, high = rows.min(-1, keepdims=True), rows.max(-1, keepdims=True)
        top = (1 << width) - 1
        step, zero = f2(np.maximum((high - low) / top, 6e-8)), f2(low)
        codes = np.clip(np.round((rows - zero) / step), 0, top)
        return {
            "v": pack(codes, width), "v_scale": store(step, "fp16"), "v_zero": store(zero, "fp16")
        }  # fmt: skip
    size = rows.shape[-1]
    norm = np.sqrt((rows**2).sum(-1, keepdims=True))
    unit = rows @ hadamard(size) / np.maximum(norm, TINY)
    borders = (levels(width)[1:] + levels(width)[:-1]) / 2
    return {"k": pack(np.searchsorted(borders, unit), width), "k_scale": store(f2(norm), "fp16")}


def decode_side(name: str, side: str, fields: Fields, scale: float, size: int) -> Floats:
    data = fields[side]
    if name in ("bf16", "fp16", "fp32"):
        return load(data, name)
    if name in ("fp8", "fp8_e5m2"):
        return load(data, "e4m3" if name == "fp8" else "e5m2") * scale
    if name.endswith("_per_token_head") and not name.startswith("int4"):
        kind = "int8" if name.startswith("int8") else "e4m3"
        return load(data, kind) * load(fields[f"{side}_scale"], "fp32")
    if name == "int4_per_token_head":
        word = np.ascontiguousarray(fields[f"{side}_scale"]).view("<u4")[..., 0]
        step = (word & np.uint32(0xFFFFFFF0)).view("<f4").astype(np.float64)
        codes = unpack(data, 4, size) - (word & 15).astype(np.int64)
        return rotate_signed(codes * step, back=True)
    if name == "nvfp4":
        return _from_nvfp4(data, fields[f"{side}_scale"], scale)
    width = TURBO[name][side == "v"]
    if width == 8:
        return load(data, "e4m3")
    codes = unpack(data, width, size)
    if side == "v":
        return codes * load(fields["v_scale"], "fp16") + load(fields["v_zero"], "fp16")
    unit = levels(width)[codes]
    unit = unit / np.sqrt((unit**2).sum(-1, keepdims=True))
    return unit @ hadamard(size) / math.sqrt(size) * load(fields["k_scale"], "fp16")


def _nvfp4(rows: Floats, scale: float) -> tuple[Bytes, Bytes]:
    blocks = rows.reshape(*rows.shape[:-1], -1, 16)
    steps = store(np.abs(blocks).max(-1) / 6 / scale, "e4m3")
    exact = load(steps, "e4m3")[..., None] * scale
    values = np.where(exact > 0, blocks / np.where(exact > 0, exact, 1), 0)
    return pack(to_code(values, "e2m1").reshape(rows.shape), 4), steps


def _from_nvfp4(data: Bytes, steps: Bytes, scale: float) -> Floats:
    values = from_code(unpack(data, 4, 2 * data.shape[-2]), "e2m1")
    exact = load(steps, "e4m3")[..., None] * scale
    return (values.reshape(*values.shape[:-1], -1, 16) * exact).reshape(values.shape)


def _fp8_blocks(rows: Floats, block: int, *, powers: bool) -> tuple[Bytes, Floats]:
    blocks = rows.reshape(*rows.shape[:-1], -1, block)
    step = np.maximum(np.abs(blocks).max(-1), 1e-4) / 448
    step = 2.0 ** power_above(step) if powers else f4(step)
    return store((blocks / step[..., None]).reshape(rows.shape), "e4m3"), step


def _blocks_of(values: Floats, step: Floats) -> Floats:
    blocks = values.reshape(*values.shape[:-1], step.shape[-1], -1)
    return (blocks * step[..., None]).reshape(values.shape)


def _exponents(step: Floats) -> Bytes:
    return (np.log2(step) + 127).astype(np.uint8)[..., None]


def encode(spec: Spec, rows: dict[str, Floats], scales: tuple[float, float], before: str) -> Fields:
    """All fields of cells, from rows by name (k and v; latent and rope; rows)."""
    name = content_formats(spec)["rows"]
    if isinstance(spec, Attention):
        both = zip(("k", "v"), scales, strict=True)
        sides = [encode_side(name, side, rows[side], scale, before) for side, scale in both]
        return {**sides[0], **sides[1]}
    if isinstance(spec, LatentAttention):
        return _encode_latent(spec, name, rows["latent"], rows["rope"], scales[0])
    (values,) = rows.values()
    if isinstance(spec, CompressorState):
        return {"state": store(values, name)}
    if name == "bf16":
        return {"index": store(values, "bf16")}
    if name == "mxfp4":
        blocks = values.reshape(*values.shape[:-1], -1, 32)
        step = 2.0 ** power_above(np.maximum(np.abs(blocks).max(-1), 6 * 2.0**-126) / 6)
        codes = to_code((blocks / step[..., None]).reshape(values.shape), "e2m1")
        return {"index": pack(codes, 4), "index_scale": _exponents(step)}
    data, step = _fp8_blocks(values, values.shape[-1], powers=True)
    return {"index": data, "index_scale": store(step, "fp32")}


def _encode_latent(
    spec: LatentAttention, name: str, latent: Floats, rope: Floats, scale: float
) -> Fields:
    if name in ("bf16", "fp16", "fp32"):
        return {"latent": store(latent, name), "rope": store(rope, name)}
    if name == "fp8":
        return {"latent": store(latent / scale, "e4m3"), "rope": store(rope / scale, "e4m3")}
    whole = spec.version == "v4.1"
    scaled = np.concatenate((latent, rope), -1) if whole else latent
    if name == "nvfp4_ds_mla":
        data, steps = _nvfp4(scaled, 1.0)
        width, plain = latent.shape[-1] // 2, store(rope, "e4m3")
    else:
        block = {"v3": 128, "v4": 64, "v4.1": 32}[spec.version]
        data, step = _fp8_blocks(scaled, block, powers=spec.version != "v3")
        steps = store(step, "fp32") if spec.version == "v3" else _exponents(step)
        width, plain = latent.shape[-1], store(rope, "bf16")
    if whole:
        plain = data[..., width:, :]
    return {"latent": data[..., :width, :], "rope": plain, "latent_scale": steps}


def decode(spec: Spec, fields: Fields, scales: tuple[float, float]) -> dict[str, Floats]:
    name = content_formats(spec)["rows"]
    if isinstance(spec, Attention):
        sizes = {"k": spec.head_dim, "v": spec.v_dim or spec.head_dim}
        return {
            side: decode_side(name, side, fields, scale, sizes[side])
            for side, scale in zip(("k", "v"), scales, strict=True)
        }
    if isinstance(spec, LatentAttention):
        return _decode_latent(spec, name, fields, scales[0])
    if isinstance(spec, CompressorState):
        return {"state": load(fields["state"], name)}
    if name == "bf16":
        return {"index": load(fields["index"], "bf16")}
    if isinstance(spec, Indexer) and name == "mxfp4":
        values = from_code(unpack(fields["index"], 4, spec.head_dim), "e2m1")
        step = 2.0 ** (fields["index_scale"][..., 0].astype(np.float64) - 127)
        return {"index": _blocks_of(values, step)}
    return {"index": load(fields["index"], "e4m3") * load(fields["index_scale"], "fp32")}


def _decode_latent(
    spec: LatentAttention, name: str, fields: Fields, scale: float
) -> dict[str, Floats]:
    latent, rope = fields["latent"], fields["rope"]
    if name in ("bf16", "fp16", "fp32"):
        return {"latent": load(latent, name), "rope": load(rope, name)}
    if name == "fp8":
        return {"latent": load(latent, "e4m3") * scale, "rope": load(rope, "e4m3") * scale}
    whole = spec.version == "v4.1"
    data = np.concatenate((latent, rope), -2) if whole else latent
    steps = fields["latent_scale"]
    if name == "nvfp4_ds_mla":
        values, plain = _from_nvfp4(data, steps, 1.0), None if whole else load(rope, "e4m3")
    else:
        exact = (
            load(steps, "fp32")
            if spec.version == "v3"
            else 2.0 ** (steps[..., 0].astype(np.float64) - 127)
        )
        values = _blocks_of(load(data, "e4m3"), exact)
        plain = None if whole else load(rope, "bf16")
    if plain is None:
        values, plain = values[..., : spec.latent], values[..., spec.latent :]
    return {"latent": values, "rope": plain}
