"""Objects that ranks write and read for 1,000 tokens: a table of `docs/reference/tier_format.md`.

python -m benchmarks.fleet_objects
"""

from __future__ import annotations

from typing import Any

from kvatlas.errors import AtlasError
from kvatlas.models import Model
from kvatlas.planning import Plan, plan
from kvatlas.routing import route, scattered
from kvatlas.tier.ingest import Ingest, with_room
from kvatlas.tier.opening import BLOCK, rows_of
from kvatlas.tier.request_blocks import TierSpans
from kvatlas.tier.row_numbers import RowNumbers
from kvatlas.tier.row_objects import RowObjects
from kvatlas.tier.row_runs import RowRuns
from kvatlas.tier.staging_rows import StagingRows

MODELS = {
    "Qwen3-8B": "dense, 8 heads",
    "gpt-oss-20b": "windows, 8 heads",
    "DeepSeek-V3.2": "MLA",
    "Qwen3.5-397B-A17B": "hybrid, 2 heads",
}
SIZES = (1, 2, 4, 8, 16)
TOKENS = 1024


def counted(rows: Plan, cut: RowObjects, made: Plan) -> tuple[int, int, int]:
    """Objects that all ranks write, that the busiest one writes, and that it reads."""
    spans = TierSpans(rows, made)
    keys = {group: [b"%d" % n for n in range(TOKENS)] for group in range(len(rows.groups))}
    needs = spans.needs(0, TOKENS, keys)
    numbered = RowNumbers(rows, needs)
    ingest, way, tables = Ingest(made, rows), route(with_room(rows), made), scattered(made, TOKENS)
    staging = StagingRows(cut, 0)
    written, read = [], []
    for rank in range(made.ranks):
        if rank in ingest.sources:
            _, known = ingest.copies(rank, tables, (0, TOKENS), numbered.numbers)
            first = rank == ingest.sources[0]
            shares = [cut.groups[n.group].share(*known[n.shape], first=first) for n in needs]
            if any(share.partly for share in shares):
                raise SystemExit(f"tp {made.tp} cuts objects of {made.model}")
            written.append(sum(len(share.whole) for share in shares))
        ends: dict[str, Any] = {"source_blocks": numbered.tables(), "destination_blocks": tables}
        bound = way.bind(source_rank=0, destination_rank=rank, tokens=TOKENS, **ends)
        runs = RowRuns(bound.copies, "source", numbered)
        asked = 0
        for need, number in numbered.numbers.items():
            asked += len(runs.objects(rows.groups[need.group].pool, number, staging))
        read.append(asked)
    return sum(written), max(written), max(read)


def main() -> None:
    print(f"| model | object | {' | '.join(f'tp {tp}' for tp in SIZES)} |")
    print("|---|--:|" + "--:|" * len(SIZES))
    for name, about in MODELS.items():
        model = Model.load(name)
        rows = rows_of(model, BLOCK, TOKENS, "1TiB")
        cut = RowObjects(rows)
        largest = max(size for group in cut.groups for size in group.sizes)
        cells = []
        for tp in SIZES:
            try:
                made = plan(model, memory="64GiB", tp=tp, layout="LBHNC", max_len=TOKENS)
            except AtlasError as refusal:
                cells.append(f"{refusal.code}")
                continue
            total, most, read = (n * 1000 / TOKENS for n in counted(rows, cut, made))
            cells.append(f"{total:.0f}: {most:.0f}, {read:.0f}")
        print(f"| {name}, {about} | {largest / 2**20:.1f} MiB | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
