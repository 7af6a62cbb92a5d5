"""Check whether the caches of one plan can be copied to another, and at what cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.integers import ceil_div, positive
from kvatlas.planning import Group, Plan
from kvatlas.planning.plans import checked_plan
from kvatlas.planning.sized_layers import FIXED_KINDS
from kvatlas.routing.binding import Copy
from kvatlas.routing.compatibility import Reason, fingerprint, reasons
from kvatlas.routing.conversion import FormatChange
from kvatlas.routing.costs import Costs, Report, report
from kvatlas.routing.plan_ends import PlanEnd
from kvatlas.routing.routes import Route
from kvatlas.routing.token_ranges import token_range

_TOKENS = 4096
_ANY_SCALES: dict[str, Any] = {"source_scales": 1.0, "destination_scales": 1.0}
"""Placeholder scales: whether two plans are convertible does not depend on their values."""


@dataclass(frozen=True)
class RankPair:
    """A source rank and a destination rank, with a report on the transfer between them."""

    source_rank: int
    destination_rank: int
    report: Report


@dataclass(frozen=True)
class Check:
    """Result of `check`: the transfers between ranks, or the reasons why a copy is impossible."""

    reasons: tuple[Reason, ...]
    fingerprints: tuple[str, str]
    tokens: int
    pairs: tuple[RankPair, ...]
    conversion: tuple[FormatChange, ...] = ()
    """The format changes of a converting route. Such transfers are always staged."""

    @property
    def ok(self) -> bool:
        """Whether the caches can be copied, that is, whether `reasons` is empty."""
        return not self.reasons

    @property
    def descriptors(self) -> int:
        """Descriptors of one request, summed over all ranks."""
        return sum(pair.report.descriptors for pair in self.pairs)

    @property
    def nbytes(self) -> int:
        """Bytes of one request, summed over all ranks."""
        return sum(pair.report.nbytes for pair in self.pairs)

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict."""
        return {
            "ok": self.ok,
            "reasons": [{"code": str(r.code), "got": r.got} for r in self.reasons],
            "fingerprints": list(self.fingerprints),
            "tokens": self.tokens,
            "descriptors": self.descriptors,
            "bytes": self.nbytes,
            "conversion": [change.as_dict() for change in self.conversion],
            "pairs": [
                {
                    "src_rank": pair.source_rank,
                    "dst_rank": pair.destination_rank,
                    "descriptors": pair.report.descriptors,
                    "bytes": pair.report.nbytes,
                    "smallest": pair.report.smallest,
                    "median": pair.report.median,
                    "largest": pair.report.largest,
                    "direct_seconds": pair.report.direct,
                    "staged_seconds": pair.report.staged,
                    "stage": pair.report.stage or bool(self.conversion),
                }
                for pair in self.pairs
            ],
        }


def check(
    source: Plan,
    destination: Plan,
    *,
    tokens: int | None = None,
    layers: Iterable[str] | None = None,
    costs: Costs | None = None,
    convert: str | None = None,
) -> Check:
    """Check whether caches of `source` can be copied to `destination`, and list reasons why not.

    `convert` names the conversions between different formats, as in `route`. The check needs no
    scales. Descriptors are counted for a request of `tokens` tokens whose blocks are scattered
    over the pools, which is the worst case.

    >>> from kvatlas.planning import plan
    >>> prefill = plan("Qwen3-8B", memory="8GiB", tp=2, layout="BLHNC")
    >>> decode = plan("Qwen3-8B", memory="8GiB", layout="BHLNC", kv_dtype="fp8")
    >>> [str(reason.code) for reason in check(prefill, decode).reasons]
    ['unlike_dtypes']
    >>> result = check(prefill, plan("Qwen3-8B", memory="8GiB", layout="BLHNC"), tokens=1024)
    >>> result.ok, result.descriptors
    (True, 4608)
    """
    names = None if layers is None else frozenset(layers)
    ends = PlanEnd(checked_plan(source)), PlanEnd(checked_plan(destination))
    refused = tuple(reasons(*ends, layers=names, converting=convert is not None))
    most = min(source.max_len, destination.max_len)
    first_tokens = min(_TOKENS, most) if tokens is None else positive(tokens, "tokens")
    _, stop = token_range(first_tokens, most)
    pairs = []
    way: Route | None = None
    if not refused:
        try:
            way = Route(
                source,
                destination,
                layers=names,
                convert=convert,
                **({} if convert is None else _ANY_SCALES),
            )
        except AtlasError as refusal:
            if convert is None:
                raise
            refused = (Reason(refusal.code, str(refusal.got), refusal.hint),)
    if way is not None:
        request: dict[str, Any] = {"tokens": stop}
        request.update(
            source_blocks=scattered(source, stop), destination_blocks=scattered(destination, stop)
        )
        for destination_rank in range(destination.ranks):
            for source_rank in way.sources(destination_rank):
                request.update(source_rank=source_rank, destination_rank=destination_rank)
                copies: Iterable[Copy]
                if way.conversion is None:
                    copies = way.bind(**request).copies
                else:
                    copies = [part.copy(part.box.wire) for part in way.converted(**request).parts()]
                pairs.append(RankPair(source_rank, destination_rank, report(tuple(copies), costs)))
    changes = () if way is None or way.conversion is None else way.conversion.changes
    return Check(
        refused, (fingerprint(source), fingerprint(destination)), stop, tuple(pairs), changes
    )


def scattered(plan: Plan, tokens: int) -> dict[int, list[int]]:
    """Return block tables for one request, in which no two blocks are adjacent if possible.

    >>> from kvatlas.planning import plan
    >>> scattered(plan("Qwen3-8B", memory="1GiB", max_len=512), 48)
    {0: [4, 2, 0]}
    """
    sizes = [_entries(group, tokens, plan.dcp) for group in plan.groups]
    tables: dict[int, list[int]] = {}
    for pool in sorted({group.pool for group in plan.groups}):
        mine = [index for index, group in enumerate(plan.groups) if group.pool == pool]
        blocks = min(p.blocks for p in plan.pools if p.index == pool)
        needed = sum(sizes[index][1] for index in mine)
        if needed > blocks:
            problem = f"A request of {tokens} tokens does not fit into pool {pool}"
            got = f"{blocks} blocks; {needed} are needed"
            hint = "Pass fewer tokens, or plan with more memory"
            raise AtlasError(Code.MISSING_BLOCKS, problem, got=got, hint=hint)
        step = 2 if 2 * needed <= blocks + 1 else 1
        free = iter(range((needed - 1) * step, -1, -step))
        for index in mine:
            entries, held = sizes[index]
            tables[index] = [*[0] * (entries - held), *islice(free, held)]
    return tables


def _entries(group: Group, tokens: int, dcp: int) -> tuple[int, int]:
    """Return (entries, held): a block table's length, and how many of its last entries have blocks.

    Earlier entries have no block, because their tokens have left the window.
    """
    if group.kind in FIXED_KINDS:
        return 1, 1
    held = group.blocks(tokens, dcp=dcp)
    if group.kind == "cross_attention":
        return held, held
    entries = ceil_div(tokens, group.block * dcp)
    return entries, min(entries, held)
