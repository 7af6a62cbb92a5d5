"""`Plan`: groups, pools and regions of every rank, as data that travels.

A plan holds no tensor and no device. It prints, compares, hashes, goes to JSON and
back, and is checked whenever it is made or read.

- A **group** is the layers that share one block table.
- A **pool** is one allocation of a pipeline stage; the groups in it overlay each
  other, since a block id belongs to one of them at a time.
- A **region** is where alike layers of a group lie in a pool: an order, an offset,
  and the strides of pages and blocks. Every tensor-parallel rank of a stage has the
  same regions; they differ in which heads and rows those hold.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Page, Placement
from kvatlas.planning import report
from kvatlas.planning.plan_checks import MOST_PAGES, MOST_REGIONS, MOST_SPECS, check_plan
from kvatlas.planning.plan_data import PlanData
from kvatlas.planning.plan_parts import Pool, Region
from kvatlas.specs import Spec

LARGEST_JSON = 4 << 20
"""Bytes of the largest plan that is read; those of real models have at most 150,000."""

VERSION = 1
"""The version of plans as JSON that is written and read. Version 1 says nothing of itself, so that
the same plan has the same bytes, and the same hash, for all who know it; later ones do, in a field
`version`, where they have something that an older reader must not overlook."""


class _PlanVersion(msgspec.Struct):
    version: Annotated[int, msgspec.Meta(ge=1)] | None = None


class _LayerOutline(msgspec.Struct):
    spec: msgspec.Raw


class _RegionOutline(msgspec.Struct):
    layers: list[_LayerOutline]


class _PlanOutline(msgspec.Struct):
    """As much of a plan as says how much there is to read."""

    regions: list[_RegionOutline]


class Plan(PlanData, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Where everything that a model caches lies, on every rank.

    >>> from kvatlas.planning import plan
    >>> print(plan("gpt-oss-20b", memory="40GiB"))  # doctest: +NORMALIZE_WHITESPACE
    gpt-oss-20b, tp 1, policy atlas, layout LBNHC: blocks of 16 tokens, 2 groups,
    109,226 x 393,216 bytes
    """

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Refuse a plan whose parts do not fit together, in bounds and apart."""
        check_plan(self)

    def __str__(self) -> str:
        pools = " + ".join(f"{p.blocks:,} x {p.block_bytes:,} bytes" for p in self.pools)
        ranks = f"tp {self.tp}" + (f", pp {self.pp}" if self.pp > 1 else "")
        count = len(self.groups)
        return (
            f"{self.model}, {ranks}, policy {self.policy}, layout {self.layout}: blocks of "
            f"{self.block_size} tokens, {count} group{'s' * (count != 1)}, {pools}"
        )

    def __repr__(self) -> str:
        return f"<Plan {self}>"

    # -- travel ---------------------------------------------------------------------

    def to_json(self) -> bytes:
        """The plan as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, text: bytes | str) -> Plan:
        """A plan from JSON, checked as if it were made here; `unlike_versions` for a newer one's.

        What no real plan comes near is refused before it costs anything: `LARGEST_JSON`
        bytes, `MOST_PAGES` layers or parts of layers in `MOST_REGIONS` regions, `MOST_SPECS`
        kinds of layers.
        """
        try:
            if isinstance(text, bytes | str) and len(text) > LARGEST_JSON:
                raise _too_large(f"{len(text):,} bytes, where {LARGEST_JSON:,} are read")
            said = check_plan_version(text)
            _check_outline(text)
            if said is None:
                return msgspec.json.decode(text, type=cls)
            fields = msgspec.json.decode(text)
            del fields["version"]
            return msgspec.convert(fields, type=cls)
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as problem:
            hint = "Make it again with the same version of kvatlas"
            cause = problem.__cause__
            got = str(problem)
            if isinstance(problem, AtlasError):
                if problem.code is Code.UNLIKE_VERSIONS:
                    raise
                cause = problem
            if isinstance(cause, AtlasError) and cause.code is Code.BAD_PLAN:
                got = str(cause.got)  # msgspec wraps what the validator raised
            raise AtlasError(Code.BAD_PLAN, got=got, hint=hint) from problem

    # -- geometry -------------------------------------------------------------------

    @cached_property
    def _homes(self) -> dict[str, list[tuple[Region, int]]]:
        homes: dict[str, list[tuple[Region, int]]] = {}
        for region in self.regions:
            for index, layer in enumerate(region.layers):
                homes.setdefault(layer.name, []).append((region, index))
        for parts in homes.values():
            parts.sort(key=lambda home: home[0].part(home[1]))
        return homes

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of all layers that keep a cache."""
        return tuple(self._homes)

    def region_of(self, layer: str, part: int = 0) -> tuple[Region, int]:
        """The region of a layer, or of one part of it, and its index along L there."""
        if part and not 0 < part < len(self._homes.get(layer, ())):
            raise AtlasError(
                Code.OUT_OF_RANGE,
                "The layer's state has no such part",
                got=f"part {part} of {layer}",
                hint="Plan.parts says how many there are",
            )
        if layer not in self._homes:
            hint = f"This plan has {len(self._homes)} layers: {', '.join(self.layers[:2])}, ..."
            raise AtlasError(Code.UNKNOWN_LAYER, got=repr(layer), hint=hint)
        return self._homes[layer][part]

    def parts(self, layer: str) -> int:
        """How many parts a layer's state is split into: 1 unless the plan says otherwise."""
        self.region_of(layer)
        return len(self._homes[layer])

    def page(self, layer: str, rank: int = 0, part: int = 0) -> Page:
        """A layer's page, for one kernel block, on one tensor-parallel rank."""
        region, index = self.region_of(layer, part)
        return region.page(self.tp, rank, index)

    def placement(self, layer: str, part: int = 0) -> Placement:
        """Where a layer's cells lie in its pool: axes B, H, N, C, and k for kernel blocks."""
        region, index = self.region_of(layer, part)
        return region.placement(self.tp, self.pool_of(layer).blocks).select("L", index)

    def view(self, layer: str, field: str, part: int = 0) -> Placement:
        """Where one field of a layer lies in its pool."""
        return self.page(layer, part=part).view(self.placement(layer, part), field)

    def spec(self, layer: str) -> Spec:
        """What a layer caches.

        >>> from kvatlas.planning import plan
        >>> plan("gpt-oss-20b", memory="40GiB").spec("model.layers.0.attn.attn").visibility.window
        128
        """
        region, index = self.region_of(layer)
        return region.layers[index].spec

    def pool_of(self, layer: str) -> Pool:
        """The pool that a layer lies in."""
        region, _ = self.region_of(layer)
        return self.pools_by_stage[region.stage, self.groups[region.group].pool]

    @cached_property
    def groups_to_clear(self) -> tuple[int, ...]:
        """Groups whose blocks are zeroed when they take them.

        Recurrent states are read before they are written. And where groups of one pool keep
        unlike numbers, the bytes that one leaves can be NaN to the other, whose kernels read
        whole blocks: what a mask multiplies by zero is then NaN all the same.

        >>> from kvatlas.planning import plan
        >>> plan("gpt-oss-20b", memory="40GiB").groups_to_clear
        ()
        """
        kept: dict[int, set[str]] = {index: set() for index in range(len(self.groups))}
        for region in self.regions:
            fields = region.page(self.tp).fields
            kept[region.group] |= {field.dtype.name for field in fields}
        unclean = []
        for index, group in enumerate(self.groups):
            shared = [n for n, other in enumerate(self.groups) if other.pool == group.pool]
            numbers = set().union(*(kept[n] for n in shared))
            if group.kind == "recurrent" or (len(shared) > 1 and len(numbers) > 1):
                unclean.append(index)
        return tuple(unclean)

    # -- in words -------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """What an operator asks first, as one JSON object."""
        return report.summary(self)

    def explain(self) -> str:
        """The reason for the block size and for each byte of waste, in sentences."""
        return report.explain(self)


def check_plan_version(text: bytes | str) -> int | None:
    """The version that a plan's JSON says it is of, if any; one that is not read is refused.

    >>> check_plan_version('{"version": 2, "pools_on": "another planet"}')
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: The plan is in a version that this kvatlas does not read. \
Got version 2 where versions up to 1 are read. \
Upgrade the kvatlas that reads it, or make the plan again here. [unlike_versions]
    """
    said = msgspec.json.decode(text, type=_PlanVersion).version
    if said is not None and said > VERSION:
        problem = "The plan is in a version that this kvatlas does not read"
        hint = "Upgrade the kvatlas that reads it, or make the plan again here"
        got = f"version {said} where versions up to {VERSION} are read"
        raise AtlasError(Code.UNLIKE_VERSIONS, problem, got=got, hint=hint)
    return said


def checked_plan(given: Any) -> Plan:
    """A plan from outside, or a refusal.

    >>> checked_plan("Qwen3-8B")  # doctest: +NORMALIZE_WHITESPACE
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: This is not a plan. Got a str. Make one with kvatlas.plan, or
    describe memory with kvatlas.planning.foreign. [bad_plan]
    """
    if not isinstance(given, Plan):
        hint = "Make one with kvatlas.plan, or describe memory with kvatlas.planning.foreign"
        got = f"a {type(given).__name__}"
        raise AtlasError(Code.BAD_PLAN, "This is not a plan", got=got, hint=hint)
    return given


def _check_outline(text: bytes | str) -> None:
    """Refuse a text that would take long to read, by what can be counted quickly."""
    regions = msgspec.json.decode(text, type=_PlanOutline).regions
    specs = [bytes(layer.spec) for region in regions for layer in region.layers]
    if len(specs) > MOST_PAGES or len(regions) > MOST_REGIONS:
        raise _too_large(f"{len(specs):,} layers in {len(regions):,} regions")
    if len(set(specs)) > MOST_SPECS:
        raise _too_large(f"{len(set(specs)):,} kinds of layers")


def _too_large(got: str) -> AtlasError:
    return AtlasError(Code.BAD_PLAN, got=f"{got}: more than any model has", hint="Plan it again")


# msgspec crashes where two threads are the first to decode a type: the first is this one.
for _kind in (_PlanVersion, _PlanOutline, Plan):
    msgspec.json.Decoder(_kind)
