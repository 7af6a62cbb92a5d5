"""`Plan`: the groups, pools and regions of every rank, as data.

A plan has no tensor and no device. It can be printed, compared, hashed and converted to
JSON and back, and it is validated whenever it is made or read.

- A **group** is a set of layers that share one block table.
- A **pool** is one allocation on the ranks of a pipeline stage. The groups in it overlay each
  other, because a block id belongs to one group at a time.
- A **region** contains the layers of a group that have the same kind of page. The region specifies
  the position of these pages in a pool: a layout, an offset, and the strides of pages and blocks.
  Every tensor-parallel rank of a stage has the same regions, with different heads and rows.
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
"""Limit on the bytes of a plan in JSON; plans of real models have at most 150,000 bytes."""

VERSION = 2
"""The newest version of the JSON format. Version 1 has no `version` field, so that the same plan
has the same bytes and the same hash in every release that reads it. Later versions record their
number in `version` if they contain something that an older reader must not ignore. Plans with
regions whose fields are stored apart, or pools with segments, are of version 2; all others are of
version 1."""


class _PlanVersion(msgspec.Struct):
    version: Annotated[int, msgspec.Meta(ge=1)] | None = None


class _LayerOutline(msgspec.Struct):
    spec: msgspec.Raw


class _RegionOutline(msgspec.Struct):
    layers: list[_LayerOutline]


class _PlanOutline(msgspec.Struct):
    """The fields of a plan's JSON from which its layers and regions can be counted."""

    regions: list[_RegionOutline]


class Plan(PlanData, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """The position of every byte that a model caches, on every rank.

    >>> from kvatlas.planning import plan
    >>> print(plan("gpt-oss-20b", memory="40GiB"))  # doctest: +NORMALIZE_WHITESPACE
    gpt-oss-20b, tp 1, policy atlas, layout LBNHC: blocks of 16 tokens, 2 groups,
    109,226 x 393,216 bytes
    """

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise an error if the plan's parts overlap, are out of bounds or contradict each other.

        The constructor and `from_json` call this.
        """
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

    # -- JSON -----------------------------------------------------------------------

    def to_json(self) -> bytes:
        """Return the plan as JSON."""
        text = msgspec.json.encode(self)
        version = _version(self)
        return text if version == 1 else b'{"version":%d,' % version + text[1:]

    def without_notes(self) -> Plan:
        """Return the plan without its reasons and warnings, which are prose for the user.

        Peers and files compare plans in this form, because the prose changes from one release
        to the next.

        >>> from kvatlas.planning import plan
        >>> noted = plan("Qwen3.5-397B-A17B", memory="60GiB", tp=2)
        >>> len(noted.reasons) > 0, noted.without_notes().reasons
        (True, ())
        """
        return msgspec.structs.replace(self, reasons=(), warnings=())

    @classmethod
    def from_json(cls, text: bytes | str) -> Plan:
        """Read a plan from untrusted JSON and validate it.

        A plan in a newer format raises an error with code `unlike_versions`. A plan above the
        limits (`LARGEST_JSON` bytes, `MOST_PAGES` pages, `MOST_REGIONS` regions, `MOST_SPECS`
        different specs) raises an error before it is decoded.
        """
        try:
            if isinstance(text, bytes | str) and len(text) > LARGEST_JSON:
                raise _too_large(f"{len(text):,} bytes; the limit is {LARGEST_JSON:,}")
            version = check_plan_version(text)
            _check_outline(text)
            if version is None:
                return _of_version(msgspec.json.decode(text, type=cls), 1)
            fields = msgspec.json.decode(text)
            del fields["version"]
            return _of_version(msgspec.convert(fields, type=cls), version)
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as problem:
            hint = "Create the plan again with this version of kvatlas"
            cause = problem.__cause__
            what, got = "The plan is invalid", str(problem)
            if isinstance(problem, AtlasError):
                if problem.code is Code.UNLIKE_VERSIONS:
                    raise
                cause = problem
            if isinstance(cause, AtlasError) and cause.code is Code.BAD_PLAN:
                what, got = cause.problem, str(cause.got)  # msgspec wraps the validator's error
            raise AtlasError(Code.BAD_PLAN, what, got=got, hint=hint) from problem

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
        """Names of all layers that have a cache."""
        return tuple(self._homes)

    def region_of(self, layer: str, part: int = 0) -> tuple[Region, int]:
        """Return (region, page index): where part `part` of a layer's state is stored.

        A layer that is not split has only part 0.
        """
        if part and not 0 < part < len(self._homes.get(layer, ())):
            raise AtlasError(
                Code.OUT_OF_RANGE,
                "The layer's state has no such part",
                got=f"part {part} of {layer}",
                hint=f"Pass a part in 0..{max(1, len(self._homes.get(layer, ()))) - 1}",
            )
        if layer not in self._homes:
            names = ", ".join(self.layers[:2])
            hint = f"Use one of the plan's {len(self._homes)} layers: {names}, ..."
            raise AtlasError(Code.UNKNOWN_LAYER, got=repr(layer), hint=hint)
        return self._homes[layer][part]

    def parts(self, layer: str) -> int:
        """Return the number of parts into which the plan splits a layer's state, usually 1."""
        self.region_of(layer)
        return len(self._homes[layer])

    def page(self, layer: str, rank: int = 0, part: int = 0) -> Page:
        """Return the page of a layer, or of one part of its state, on a tensor-parallel rank.

        A page describes the fields and bytes of one kernel block.
        """
        region, index = self.region_of(layer, part)
        return region.page(self.tp, rank, index)

    def placement(self, layer: str, part: int = 0) -> Placement:
        """Return the offset, sizes and strides of a layer's pages in its pool.

        The axes are B (block), H (head), N (state, usually one token) and C (bytes), and, if blocks
        contain several kernel blocks, k (kernel block). If the state of a recurrent layer is split
        into parts, only the pages of part `part` are included. Raises an error if the fields of the
        layer are stored apart.
        """
        region, index = self.region_of(layer, part)
        return region.placement(self.tp, self.pool_of(layer).blocks).select("L", index)

    def view(self, layer: str, field: str, part: int = 0) -> Placement:
        """Return the offset, sizes and strides of a layer's field, such as `k`, in its pool.

        If the layer's state is split, the field of part `part` is returned.
        """
        region, index = self.region_of(layer, part)
        if not region.apart:
            return self.page(layer, part=part).view(self.placement(layer, part), field)
        self.page(layer).field(field)  # raises an error if there is no such field
        views = region.views(self.tp, self.pool_of(layer).blocks, index)
        return views[field].select("L", index)

    def spec(self, layer: str) -> Spec:
        """Return the spec of a layer.

        >>> from kvatlas.planning import plan
        >>> plan("gpt-oss-20b", memory="40GiB").spec("model.layers.0.attn.attn").visibility.window
        128
        """
        region, index = self.region_of(layer)
        return region.layers[index].spec

    def pool_of(self, layer: str) -> Pool:
        """Return the pool that contains a layer."""
        region, _ = self.region_of(layer)
        return self.pools_by_stage[region.stage, self.groups[region.group].pool]

    @cached_property
    def groups_to_clear(self) -> tuple[int, ...]:
        """Groups whose blocks must be zeroed when they are allocated.

        There are two cases. Recurrent states are read before they are written. And if groups of
        one pool have different dtypes, bytes that one group leaves in a block may be NaN in the
        dtype of another: kernels read whole blocks, and a NaN that is masked by multiplying
        with zero stays NaN.

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

    # -- reports --------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Return the main figures of the plan as one JSON object."""
        return report.summary(self)

    def explain(self) -> str:
        """Explain the block size, the capacity and all unused bytes, in sentences."""
        return report.explain(self)


def check_plan_version(text: bytes | str) -> int | None:
    """Return the `version` field of a plan's JSON; None if it is absent.

    Raises an error if this version of kvatlas cannot read plans of that version.

    >>> check_plan_version('{"version": 3, "pools_on": "another planet"}')
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: The plan's format is too new for this version of kvatlas. \
Got version 3; this version of kvatlas reads versions up to 2. \
Upgrade kvatlas, or create the plan again with this version. [unlike_versions]
    """
    version = msgspec.json.decode(text, type=_PlanVersion).version
    if version is not None and version > VERSION:
        problem = "The plan's format is too new for this version of kvatlas"
        hint = "Upgrade kvatlas, or create the plan again with this version"
        got = f"version {version}; this version of kvatlas reads versions up to {VERSION}"
        raise AtlasError(Code.UNLIKE_VERSIONS, problem, got=got, hint=hint)
    return version


def _version(plan: Plan) -> int:
    """Return the oldest version of the JSON format that can represent a plan."""
    in_segments = any(pool.segments is not msgspec.UNSET for pool in plan.pools)
    return 2 if in_segments or any(region.apart for region in plan.regions) else 1


def _of_version(plan: Plan, version: int) -> Plan:
    """Return `plan`; raise an error if format version `version` cannot represent all of it."""
    if version < _version(plan):
        got = f"version {version}, with separate fields or with segments, which need version 2"
        hint = "Create the plan again with this version of kvatlas"
        raise AtlasError(Code.BAD_PLAN, got=got, hint=hint)
    return plan


def checked_plan(given: Any) -> Plan:
    """Return the argument if it is a `Plan`; otherwise raise an error.

    >>> checked_plan("Qwen3-8B")  # doctest: +NORMALIZE_WHITESPACE
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: The argument must be a Plan. Got a str. Create one with
    kvatlas.plan, or describe an engine's memory with kvatlas.planning.foreign. [bad_plan]
    """
    if not isinstance(given, Plan):
        raise AtlasError(
            Code.BAD_PLAN,
            "The argument must be a Plan",
            got=f"a {type(given).__name__}",
            hint="Create one with kvatlas.plan, or describe an engine's memory with "
            "kvatlas.planning.foreign",
        )
    return given


def _check_outline(text: bytes | str) -> None:
    """Raise an error if the JSON of a plan has too many layers, regions or specs to decode."""
    regions = msgspec.json.decode(text, type=_PlanOutline).regions
    specs = [bytes(layer.spec) for region in regions for layer in region.layers]
    counts = (
        ("pages", len(specs), MOST_PAGES),
        ("regions", len(regions), MOST_REGIONS),
        ("different specs", len(set(specs)), MOST_SPECS),
    )
    for what, count, most in counts:
        if count > most:
            raise _too_large(f"{count:,} {what}; the limit is {most:,}")


def _too_large(got: str) -> AtlasError:
    problem = "The plan is too large to read"
    hint = "Create the plan again with kvatlas.plan"
    return AtlasError(Code.BAD_PLAN, problem, got=got, hint=hint)


# msgspec crashes if two threads are the first to decode a type, so create the decoders here.
for _kind in (_PlanVersion, _PlanOutline, Plan):
    msgspec.json.Decoder(_kind)
