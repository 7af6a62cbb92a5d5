"""The cases of the corpus, computed by kvatlas: views of plans, and routes between plans."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvatlas import AtlasError
from kvatlas.geometry import StateBlocks
from kvatlas.geometry.address_arrays import join_copies, join_ranges
from kvatlas.planning import CacheDocument, Plan, TablesDocument
from kvatlas.routing import route
from kvatlas.specs import Ring

Runs = list[list[int]]


class Regions:
    """The regions of a document, as the pools of its plan and their segments."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.first = plan, {}
        number = 0
        for pool in sorted(plan.pools, key=lambda pool: (pool.stage, pool.index)):
            self.first[pool.stage, pool.index] = number
            number += len(pool.segments) if isinstance(pool.segments, tuple) else 1

    def locate(self, stage: int, pool: int, offsets: Any) -> tuple[Any, Any]:
        which, within = self.plan.pools_by_stage[stage, pool].locate(offsets)
        return which + self.first[stage, pool], within


def field_runs(plan: Plan, tables: TablesDocument, case: dict[str, Any]) -> Runs:
    """The runs of a field, from the views that engines use."""
    layer, name, rows = case["layer"], case["field"], case["rows"]
    stage, tp_rank = plan.split_rank(case["rank"])
    found: Runs = []
    for part in range(plan.parts(layer)):
        region, _ = plan.region_of(layer, part)
        if region.stage != stage:
            continue
        view, field = plan.view(layer, name, part), plan.page(layer, tp_rank, part).field(name)
        table = next(one for one in tables.tables if one.group == region.group)
        starts, lengths = [], []
        for placed in states(plan, layer, view, table, tp_rank):
            for held in field.ranges:
                first = max(held.start, rows[0]) if rows else held.start
                stop = min(held.start + held.length, rows[1]) if rows else held.start + held.length
                if first < stop:
                    local = held.local + first - held.start
                    own = placed.narrow(field.sharding.axis, local, stop - first).runs()
                    starts.append(own[0])
                    lengths.append(own[1])
            if not field.ranges:
                own = placed.runs()
                starts.append(own[0])
                lengths.append(own[1])
        if starts:
            at, nbytes = join_ranges(np.concatenate(starts), np.concatenate(lengths))
            which, within = Regions(plan).locate(stage, plan.groups[region.group].pool, at)
            found += [list(run) for run in zip(*(x.tolist() for x in (which, within, nbytes)))]  # noqa: B905
    return joined(found)


def joined(found: Runs) -> Runs:
    """Runs of several parts: parts may hold copies of the same row, but never share bytes."""
    out: Runs = []
    for run in sorted(found):
        if out and out[-1][0] == run[0] and out[-1][1] + out[-1][2] == run[1]:
            out[-1][2] += run[2]
        else:
            out.append(run)
    return out


def states(plan: Plan, layer: str, view: Any, table: Any, tp_rank: int) -> Any:
    """The placement of a field in each state of the request on this rank."""
    first, stop = table.tokens
    spec = plan.spec(layer)
    if first == stop:
        return
    if spec.tokens_per_state is None:
        yield view.select("B", table.blocks[0])
        return
    many = view.size("N")
    split = view.size("k") if "k" in view.axes else 1
    ring = isinstance(spec, Ring)
    blocks = StateBlocks(many, split, 1 if ring else plan.dcp, ring=ring)
    numbers = np.arange(first // spec.tokens_per_state, stop // spec.tokens_per_state)
    if ring:
        numbers = numbers[-many:]
    else:
        numbers = numbers[numbers % plan.dcp == tp_rank % plan.dcp] // plan.dcp
    at = blocks.locate(numbers)
    for entry, kernel, state in zip(*(x.tolist() for x in at), strict=True):
        placed = view.select("B", table.blocks[entry]).select("N", state)
        yield placed.select("k", kernel) if "k" in placed.axes else placed


def copy_runs(plans: list[Plan], tables: list[TablesDocument], ranks: list[int]) -> Runs | None:
    """The runs of a copy, from a route; None if the route reads these bytes from another rank."""
    way = route(*plans)
    if ranks[0] not in way.sources(ranks[1]):
        return None
    first = max(table.tokens[0] for own in tables for table in own.tables)
    stop = min(table.tokens[1] for own in tables for table in own.tables)
    blocks = [
        {table.group: [block or 0 for block in table.blocks] for table in own.tables}
        for own in tables
    ]
    bound = way.bind(
        source_rank=ranks[0], destination_rank=ranks[1], source_blocks=blocks[0],
        destination_blocks=blocks[1], tokens=(first, stop),
    )  # fmt: skip
    stages = [plan.split_rank(rank)[0] for plan, rank in zip(plans, ranks, strict=True)]
    ends = [Regions(plan) for plan in plans]
    found = []
    for one in bound.copies:
        source, destination, length = join_copies(*one.runs())
        here = ends[0].locate(stages[0], one.source_pool, source)
        there = ends[1].locate(stages[1], one.destination_pool, destination)
        columns = (*here, *there, length)
        found += [list(run) for run in zip(*(x.tolist() for x in columns), strict=True)]
    return sorted(found, key=lambda run: run[2:4])


def refusal(files: Any, case: dict[str, Any]) -> str | None:
    """The code with which kvatlas refuses the document or the tables of a case, if it does."""
    try:
        document = CacheDocument.from_json(files(case["document"]))
        if "tables" in case:
            TablesDocument.from_json(files(case["tables"]), document)
    except AtlasError as error:
        return str(error.code)
    return None
