"""Kinds of batches: batches of the same kind share compiled kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvatlas.kernels.triton.attention.layer_launch import AttentionCall
from kvatlas.kernels.triton.attention.step_schedule import Schedule
from kvatlas.kernels.triton.relaunch import TensorKind, kind_of, number_kind


class BatchKind(NamedTuple):
    """The properties of a batch that identify its compiled kernels.

    Batches with equal properties also pass the same checks, except for tensor sizes, which are
    checked in each call. Triton specialises kernels on whether 16 divides an address or an integer,
    whether an integer is 1, and how many bits it has. Strides are part of the tensors' kinds.
    """

    tensors: tuple[TensorKind | None, ...]
    one_sequence: bool
    aligned_count: bool
    bits: int
    """Bit length of the number of sequences minus 1. It determines how many partial
    results a merge program loads together."""


def batch_kind(
    call: AttentionCall,
    queries: torch.Tensor | None,
    starts: torch.Tensor | None,
    prepared: Schedule | None,
) -> BatchKind:
    """Return the properties of a call's batch on which compiled kernels depend."""
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
