"""What kernels are compiled for of a batch: batches of a kind share what was compiled for one."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvatlas.kernels.triton.attention.layer_launch import AttentionCall
from kvatlas.kernels.triton.attention.schedule import Schedule
from kvatlas.kernels.triton.relaunch import TensorKind, kind_of, number_kind


class BatchKind(NamedTuple):
    """All that kernels are compiled for besides a layer's launches, and all that checks ask.

    Triton compiles for whether 16 divides an address or a number, whether a number is 1, and how
    many bits it takes: strides say that of themselves. Sizes of tensors are looked at in each call.
    """

    tensors: tuple[TensorKind | None, ...]
    one_sequence: bool
    aligned_count: bool
    bits: int
    """Of the number of sequences, which decides how many are counted together."""


def batch_kind(
    call: AttentionCall,
    queries: torch.Tensor | None,
    starts: torch.Tensor | None,
    prepared: Schedule | None,
) -> BatchKind:
    """The kind of a call's batch."""
    sinks, ends = call.sink_logits, None if prepared is None else prepared.ends
    tensors = (
        kind_of(call.q),
        kind_of(call.out),
        kind_of(call.tables),
        kind_of(call.lengths),
        None if queries is None else kind_of(queries),
        None if starts is None else kind_of(starts),
        None if sinks is None else kind_of(sinks),
        None if ends is None else kind_of(ends),
    )
    count = call.lengths.numel()
    return BatchKind(tensors, *number_kind(count), (count - 1).bit_length())
