"""Checks of a batch before a launch: sequences must be consistent with each other."""

from __future__ import annotations

import torch

from kvatlas.errors import AtlasError, Code
from kvatlas.kernels.triton import checks
from kvatlas.kernels.triton.attention.layer_launch import AttentionCall
from kvatlas.kernels.triton.attention.step_schedule import Schedule, WorkSplit


def check_kinds(
    call: AttentionCall,
    queries: torch.Tensor | None,
    starts: torch.Tensor | None,
    prepared: Schedule | None,
) -> None:
    """Raise an error for tensors on another device, or with an unsupported dtype or rank."""
    checks.same_device(
        call.layer.buffer.device, q=call.q, out=call.out, tables=call.tables,
        lengths=call.lengths, queries=queries, starts=starts, sink_logits=call.sink_logits,
        prepared=None if prepared is None else prepared.ends,
    )  # fmt: skip
    checks.integers(call.tables, "tables", axes=2)
    checks.integers(call.lengths, "lengths", axes=1)
    if queries is not None:
        checks.integers(queries, "queries", axes=1)
    if starts is not None:
        checks.integers(starts, "starts", axes=1)


def check_counts(
    call: AttentionCall,
    queries: torch.Tensor | None,
    starts: torch.Tensor | None,
    max_queries: int | None,
    prepared: bool,
) -> None:
    """Raise an error for inconsistent sequences; ids and lengths are checked in debug mode."""
    if call.sink_logits is not None:
        checks.rows_of(call.sink_logits, "sink_logits", (call.q.shape[1],))
    count = call.lengths.shape[0]
    fits = call.tables.shape[0] == count
    if fits and prepared and queries is None and starts is None:
        return
    if fits:
        fits = _counts(queries, starts) == count
    if fits and checks.debugging() and count:
        fits = not _debug_batch(call, queries, starts, max_queries)
    if not fits:
        room = call.tables.shape[1] * call.launch.shape.states
        raise AtlasError(
            Code.BAD_TENSOR,
            "Tables, lengths and queries must describe the same sequences",
            got=f"{count} lengths, {call.tables.shape[0]} tables, {_counts(queries, starts)} counts"
            f" of queries, {call.q.shape[0]} rows, tables for {room} tokens",
            hint="Pass either queries or starts; queries are the last tokens of each sequence",
        )


def _counts(queries: torch.Tensor | None, starts: torch.Tensor | None) -> int | None:
    """Return the number of sequences in `queries` or `starts`; None for neither or both.

    >>> _counts(torch.ones(3), None), _counts(None, torch.ones(3)), _counts(None, None)
    (3, 2, None)
    """
    if queries is None:
        return None if starts is None else starts.shape[0] - 1
    return queries.shape[0] if starts is None else None


def _debug_batch(
    call: AttentionCall,
    queries: torch.Tensor | None,
    starts: torch.Tensor | None,
    max_queries: int | None,
) -> bool:
    """Whether lengths or counts are wrong; also checks the visible block ids."""
    visibility, states = call.layer.spec.visibility, call.launch.shape.states
    lengths, rows = call.lengths, call.q.shape[0]
    if starts is not None:
        counts = starts.diff()
        wrong = int(starts[0]) < 0 or int(starts[-1]) > rows
    else:
        counts = lengths if queries is None else queries
        wrong = int(counts.sum()) != rows
    room = call.tables.shape[1] * states
    wrong |= visibility.causal and bool((counts > lengths).any())
    wrong |= bool(((counts > 0) & (lengths < 1)).any()) or int(lengths.max()) > room
    wrong |= max_queries is not None and int(counts.max()) > max_queries
    # Entries outside a window may have any value, so only visible blocks are checked.
    first = torch.arange(call.tables.shape[1], device=call.tables.device) * states
    low = visibility.first(lengths - counts)
    reached = (first > (low - states)[:, None]) | (first < visibility.sink_tokens)
    reached &= (first < lengths[:, None]) & (counts > 0)[:, None]
    checks.in_range(call.tables[reached], call.layer.kernel_blocks.size("B"))
    return wrong


def refuse_schedule(given: Schedule, split: WorkSplit, count: int) -> None:
    """Raise an error for a schedule of another batch or split: rows would stay unwritten."""
    if given.split != split or given.sequences != count:
        raise AtlasError(
            Code.BAD_TENSOR,
            "The schedule must be made for this batch and this kind of layer",
            got=f"{given.split} of {given.sequences} sequences for {split} of {count}",
            hint="Pass split_of() of such a layer to schedule(), with the same max_queries",
        )
