"""Checks of a batch before a launch: tables, lengths and queries must be consistent."""

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
    """Raise an error for a tensor on another device, or with an unsupported dtype or axes."""
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
    """Raise an error if tables, lengths and queries have different numbers of sequences.

    With `KVATLAS_DEBUG=1`, the values of lengths, query counts and block ids are checked too.
    """
    if call.sink_logits is not None:
        checks.rows_of(call.sink_logits, "sink_logits", (call.q.shape[1],))
    count = call.lengths.shape[0]
    fits = call.tables.shape[0] == count
    if fits and prepared and queries is None and starts is None:
        return
    if not fits or _counts(queries, starts) != count:
        described = f"{count} lengths, {call.tables.shape[0]} tables"
        if (queries is None) == (starts is None):
            described += f", {'neither' if queries is None else 'both'} of queries and starts"
        else:
            described += f", queries of {_counts(queries, starts)} sequences"
        problem = "Tables, lengths and queries must describe the same number of sequences"
        hint = (
            "For each sequence, pass one table, one length and one count in `queries`. `starts` "
            "must have one entry more than there are sequences"
        )
        raise AtlasError(Code.BAD_TENSOR, problem, got=described, hint=hint)
    if checks.debugging() and count:
        _debug_batch(call, queries, starts, max_queries)


def _counts(queries: torch.Tensor | None, starts: torch.Tensor | None) -> int | None:
    """Return the number of sequences, from `queries` or `starts`; None unless exactly one is given.

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
) -> None:
    """Raise an error for lengths, query counts or block ids that are out of range.

    Only the ids of blocks that queries see are checked.
    """
    visibility, states = call.layer.spec.visibility, call.launch.shape.states
    lengths, rows = call.lengths, call.q.shape[0]
    if starts is not None:
        counts = starts.diff()
        if int(starts[0]) < 0 or int(starts[-1]) > rows:
            got = f"{int(starts[0])}..{int(starts[-1])}"
            raise _bad_batch(f"`starts` must be row numbers of `q`, from 0 to {rows}", got)
    else:
        counts = lengths if queries is None else queries
        if int(counts.sum()) != rows:
            raise _bad_batch(
                f"The sum of `queries` must be {rows}, the number of rows of `q`",
                f"a sum of {int(counts.sum())}",
            )
    room = call.tables.shape[1] * states
    if int(lengths.max()) > room:
        raise _bad_batch(
            f"Lengths must be at most {room}, the number of tokens that a table covers",
            f"a length of {int(lengths.max())}",
        )
    more = counts > lengths if visibility.causal else (counts > 0) & (lengths < 1)
    if bool(more.any()):
        one = int(more.nonzero()[0])
        got = f"{int(counts[one])} queries of a sequence of {int(lengths[one])} tokens"
        raise _bad_batch("A sequence must not have more queries than tokens", got)
    if max_queries is not None and int(counts.max()) > max_queries:
        problem = f"A sequence must not have more queries than `max_queries`, {max_queries}"
        raise _bad_batch(problem, f"{int(counts.max())} queries")
    # Entries outside a window may have any value, so only visible blocks are checked.
    first = torch.arange(call.tables.shape[1], device=call.tables.device) * states
    low = visibility.first(lengths - counts)
    reached = (first > (low - states)[:, None]) | (first < visibility.sink_tokens)
    reached &= (first < lengths[:, None]) & (counts > 0)[:, None]
    checks.in_range(call.tables[reached], call.layer.kernel_blocks.size("B"))


_CHECK_COUNTS = "Check `lengths` and the query counts; queries are the last tokens of a sequence"


def _bad_batch(problem: str, got: str) -> AtlasError:
    return AtlasError(Code.BAD_TENSOR, problem, got=got, hint=_CHECK_COUNTS)


def refuse_schedule(given: Schedule, split: WorkSplit, count: int) -> None:
    """Raise an error if a schedule was computed for another batch or another `WorkSplit`.

    With such a schedule, the kernels would leave rows of the output unwritten.
    """
    if given.sequences != count:
        problem = f"The schedule must be for the {count} sequences of the batch"
        got = f"a schedule for {given.sequences} sequences"
        hint = "Compute a schedule from the `lengths` of this batch"
        raise AtlasError(Code.BAD_TENSOR, problem, got=got, hint=hint)
    if given.split != split:
        pairs = zip(split._fields, given.split, split, strict=True)
        problem = "The schedule was made for another layer, dtype or value of `max_queries`"
        unlike = [f"{name}={old} instead of {new}" for name, old, new in pairs if old != new]
        hint = (
            "Call `split_of` with the layer, dtype and `max_queries` of this call, and pass its "
            "result to `schedule`"
        )
        raise AtlasError(Code.BAD_TENSOR, problem, got=", ".join(unlike), hint=hint)
