"""Batches that are refused before a kernel is launched: sequences that do not fit together."""

from __future__ import annotations

import torch

from kvatlas.errors import AtlasError, Code
from kvatlas.kernels.triton import checks
from kvatlas.kernels.triton.attention.call import Job
from kvatlas.kernels.triton.attention.schedule import Cut, Schedule


def check(
    job: Job,
    queries: torch.Tensor | None,
    starts: torch.Tensor | None,
    max_queries: int | None,
    prepared: bool,
) -> None:
    """Refuse what no kernel can be trusted with; ids and lengths in debug mode alone."""
    checks.same_device(
        job.layer.buffer.device, q=job.q, out=job.out, tables=job.tables, lengths=job.lengths,
        queries=queries, starts=starts, sinks=job.sinks,
    )  # fmt: skip
    checks.integers(job.tables, "tables", axes=2)
    for name, given in (("lengths", job.lengths), ("queries", queries), ("starts", starts)):
        if given is not None:
            checks.integers(given, name, axes=1)
    if job.sinks is not None:
        checks.rows_of(job.sinks, "sinks", (job.q.shape[1],))
    if queries is None and starts is None and prepared:
        return
    _refuse_batch(job, queries, starts, max_queries)


def _refuse_batch(
    job: Job,
    queries: torch.Tensor | None,
    starts: torch.Tensor | None,
    max_queries: int | None,
) -> None:
    count = job.lengths.shape[0]
    sizes = [job.tables.shape[0], *([] if queries is None else [queries.shape[0]])]
    sizes += [] if starts is None else [starts.shape[0] - 1]
    wrong = any(size != count for size in sizes) or (queries is None) == (starts is None)
    room = job.tables.shape[1] * job.layer.kernel_blocks.size("N")
    got = f"{count} lengths, {sizes} tables and queries, {job.q.shape[0]} rows, room for {room}"
    if not wrong and checks.debugging() and count:
        if starts is None:
            asked = queries if queries is not None else job.lengths
            wrong = int(asked.sum()) != job.q.shape[0]
        else:
            asked = starts.diff()
            wrong = int(starts[0]) < 0 or int(starts[-1]) > job.q.shape[0]
        wrong |= job.bound[0] != "all" and bool((asked > job.lengths).any())
        wrong |= bool(((asked > 0) & (job.lengths < 1)).any()) or int(job.lengths.max()) > room
        wrong |= max_queries is not None and int(asked.max()) > max_queries
        _debug_tables(job, asked)
    if wrong:
        raise checks.bad_batch(got)


def _debug_tables(job: Job, asked: torch.Tensor) -> None:
    """Only blocks within reach count: what a window has left behind may hold anything."""
    states = job.layer.kernel_blocks.size("N")
    first = job.lengths - asked
    kind, size, kept = job.bound
    low = first * 0
    if kind in ("window", "kept"):
        low = (first - size + 1).clamp(min=0)
    if kind == "chunk":
        low = first // size * size
    at = torch.arange(job.tables.shape[1], device=job.tables.device)
    reached = (at >= (low // states)[:, None]) | (at * states < kept)
    reached &= at * states < job.lengths[:, None]
    reached &= (asked > 0)[:, None]
    checks.in_range(job.tables[reached], job.layer.kernel_blocks.size("B"))


def refuse_schedule(given: Schedule, cut: Cut, count: int) -> None:
    """Refuse a schedule of other batches or layers: rows would be left unwritten."""
    if given.cut != cut or given.ends.shape != (3, count + 1):
        raise AtlasError(
            Code.BAD_TENSOR,
            "A schedule serves one batch, and layers that are cut alike",
            got=f"{given.cut} of {given.ends.shape[1] - 1} sequences for {cut} of {count}",
            hint="Make it by cut_of() of such a layer, with the same max_queries",
        )
