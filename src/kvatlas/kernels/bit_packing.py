"""Pack codes of fewer than 8 bits into bytes, and convert 4-bit codes to e2m1 numbers."""

from __future__ import annotations

from itertools import pairwise

import torch

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def split(values: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Return a view whose last axis is split into axes of the given sizes.

    >>> split(torch.zeros(3, 8), 2, 4).shape
    torch.Size([3, 2, 4])
    """
    # `view` cannot infer an axis of size -1 if the tensor has no elements.
    return torch.unflatten(values, -1, sizes)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes of `bits` bits into bytes along the last axis, the first code in the lowest bits.

    >>> pack(torch.tensor([1, 2, 3]), 4).tolist(), pack(torch.arange(8), 3).tolist()
    ([33, 3], [136, 198, 250])
    """
    count = codes.shape[-1]
    if bits == 4 and count % 2 == 0:  # Fast path: two codes per byte.
        pairs = split(codes.to(torch.uint8), count // 2, 2)
        return pairs[..., 0] | (pairs[..., 1] << 4)
    nbytes = -(-count * bits // 8)
    shifts = torch.arange(bits, device=codes.device)
    stream = ((codes.to(torch.int32).unsqueeze(-1) >> shifts) & 1).flatten(-2)
    stream = torch.nn.functional.pad(stream, (0, nbytes * 8 - count * bits))
    weights = 1 << torch.arange(8, device=codes.device)
    return (split(stream, nbytes, 8) * weights).sum(-1).to(torch.uint8)


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unpack the first `count` codes of `bits` bits each from the bytes of the last axis.

    >>> unpack(torch.tensor([136, 198, 250], dtype=torch.uint8), 3, 8).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    if bits == 4:
        both = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
        return both[..., :count]
    shifts = torch.arange(8, device=packed.device)
    stream = ((packed.to(torch.int32).unsqueeze(-1) >> shifts) & 1).flatten(-2)
    weights = 1 << torch.arange(bits, device=packed.device)
    return (split(stream[..., : count * bits], count, bits) * weights).sum(-1)


def to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Return the nearest e2m1 code of each value; ties go to the even code.

    >>> to_e2m1(torch.tensor([0.24, 0.25, 2.5, -6.0, 9.0])).tolist()
    [0, 0, 4, 15, 7]
    """
    size = values.abs()
    code = torch.signbit(values).to(torch.uint8) << 3
    for below, (least, most) in enumerate(pairwise(_E2M1)):
        half = (least + most) / 2
        code += size > half if below % 2 == 0 else size >= half
    return code


def from_e2m1(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the number that each e2m1 code represents, as `dtype`."""
    table = torch.tensor([*_E2M1, *(-x for x in _E2M1)], device=codes.device, dtype=dtype)
    return table[codes.int()]
