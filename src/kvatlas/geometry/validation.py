"""Validation of the parts of a buffer: bounds, overlap, alignment and holes.

Pages and plans are validated when they are constructed and again when they are read from a
peer or a file, so validation must be exact, and fast for pools of a million pages. If all parts
share an axis, such as the blocks of a pool, and fit into one step of this axis, only one step is
checked. Holes need no search: parts that do not overlap and are in bounds cover the whole buffer
if and only if their bytes add up to its size.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s, join_ranges
from kvatlas.geometry.integers import positive
from kvatlas.geometry.placement import Placement

_MOST_RUNS = 1 << 21
"""Maximum number of runs that are compared; real plans have a few hundred thousand."""


def validate(
    parts: Mapping[str, Placement],
    *,
    size: int,
    padding: Mapping[str, Placement] | None = None,
    align: int = 1,
    holes: bool = False,
) -> None:
    """Raise an error if parts are out of bounds, overlap, are misaligned or leave holes.

    `padding` declares bytes that belong to no part; if `holes` is true, all remaining
    bytes count as padding. `align` applies to the offset of each part and to its strides
    along L and B. Groups may overlay each other, because a block id belongs to one group at a
    time: validate each group separately.

    >>> rows = Placement.packed([("B", 4)], item=96, strides={"B": 128})
    >>> gaps = Placement.packed([("B", 4)], item=32, strides={"B": 128}, offset=96)
    >>> validate({"rows": rows}, size=512, padding={"gaps": gaps}, align=32)
    >>> validate({"rows": rows}, size=512)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: Some bytes belong to no part and are not declared as padding. Got ...
    """
    size, align = positive(size, "the size of a buffer"), positive(align, "the alignment")
    padding = padding or {}
    everything = {**parts, **padding}
    if len(everything) < len(parts) + len(padding):
        problem, hint = "Padding must not have the name of a part", "Rename the padding"
        raise AtlasError(Code.OVERLAP, problem, got=sorted(set(parts) & set(padding)), hint=hint)
    for name, part in everything.items():
        if not isinstance(part, Placement):
            raise AtlasError(
                Code.BAD_AXES,
                f"Part {name!r} must be a Placement",
                got=repr(part)[:100],
                hint="Pass a mapping from name to Placement",
            )
        if part.stop > size:
            got = f"{name} up to byte {part.stop} in a buffer of {size} bytes"
            hint = "Check the number of blocks against the memory"
            raise AtlasError(Code.OUT_OF_BOUNDS, got=got, hint=hint)
    for name, part in parts.items():
        steps = {axis: part.stride(axis) for axis in part.axes if set("LB") & set(axis.split("*"))}
        if part.offset % align or any(step % align for step in steps.values()):
            problem = f"Every part, page and block must start at a multiple of {align} bytes"
            got = f"{name} at byte {part.offset} with byte strides {steps}"
            hint = "Pad the pages or the blocks to the alignment"
            raise AtlasError(Code.MISALIGNED, problem, got=got, hint=hint)
    _refuse_shared_bytes(everything)
    covered = sum(part.nbytes for part in everything.values())
    if covered < size and not holes:
        raise AtlasError(
            Code.HOLE,
            got=f"{size - covered} undeclared bytes of {size}{_first_hole(everything)}",
            hint="Declare the gap as padding, or close it",
        )


def _refuse_shared_bytes(parts: Mapping[str, Placement]) -> None:
    for names in _neighbours(parts):
        starts, lengths, owners = _runs(_one_step([parts[name] for name in names]))
        order = np.argsort(starts, kind="stable")
        starts, lengths, owners = starts[order], lengths[order], owners[order]
        clash = np.flatnonzero(starts[1:] < starts[:-1] + lengths[:-1])
        if clash.size:
            first = int(clash[0])
            one, other = (names[owner] for owner in owners[first : first + 2])
            hint = "Move or shrink one of the two; validate overlaid groups one at a time"
            got = f"{one} and {other} at byte {starts[first + 1]}"
            raise AtlasError(Code.OVERLAP, got=got, hint=hint)


def refuse_unlike_steps(parts: Mapping[str, Placement]) -> None:
    """Raise an error unless a simple rule, without a search, shows that no two parts share bytes.

    Parts whose address ranges overlap must have the same outermost axis and fit into one step of
    this axis. The rule must then hold again for one step, that is, without this axis. Parts that
    break the rule are rejected even if they share no bytes, because every reader of the exchange
    format applies the same rule.

    >>> k = Placement.packed([("N", 4), ("C", 8)], strides={"N": 16})
    >>> refuse_unlike_steps({"k": k, "v": k.shift(8)})
    >>> refuse_unlike_steps({"k": k, "v": k.shift(4)})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: Parts that interleave must fit into one stride ... Got k and v. ...
    """
    for names in _neighbours(parts):
        own = {name: parts[name] for name in names}
        outer = {name: _outermost(part) for name, part in own.items()}
        inner = {
            name: part.select(found[0], 0) if (found := outer[name]) else part
            for name, part in own.items()
        }
        steps = {found and found[1:] for found in outer.values()}
        span = max(part.stop for part in inner.values())
        span -= min(part.offset for part in inner.values())
        step = steps.pop()
        if steps or step is None or span > step[1]:
            problem = "Parts that interleave must fit into one stride of the same outermost axis"
            hint = "Move or shrink one of them, or give both the same outer axes"
            got = " and ".join(names[:2])
            raise AtlasError(Code.OVERLAP, problem, got=got, hint=hint)
        refuse_unlike_steps(inner)


def _outermost(part: Placement) -> tuple[str, int, int] | None:
    """Return (name, size, stride) of the axis with the largest stride; None without axes."""
    axes = [
        (stride, axis, size)
        for axis, size, stride in zip(part.axes, part.sizes, part.strides, strict=True)
        if size > 1
    ]
    if not axes:
        return None
    stride, axis, size = max(axes)
    return axis, size, stride


def _neighbours(parts: Mapping[str, Placement]) -> list[list[str]]:
    """Divide parts into groups, so that only parts of the same group can share a byte.

    Groups of one part are omitted.
    """
    clusters: list[list[str]] = []
    reach = 0
    for name in sorted(parts, key=lambda name: parts[name].offset):
        if not clusters or parts[name].offset >= reach:
            clusters.append([])
        clusters[-1].append(name)
        reach = max(reach, parts[name].stop)
    return [names for names in clusters if len(names) > 1]


def _one_step(parts: list[Placement]) -> list[Placement]:
    """Remove the outer axes that all parts share, such as the blocks of a pool.

    An axis is removed only if the bytes that all parts reach at one coordinate do not extend beyond
    its stride. The parts are then valid at every coordinate if they are valid at one.
    """
    parts = [part.folded() for part in parts]
    while parts and all(part.axes for part in parts):
        outer = {(part.sizes[0], part.strides[0]) for part in parts}
        inner = [part.select(part.axes[0], 0) for part in parts]
        span = max(part.stop for part in inner) - min(part.offset for part in inner)
        if len(outer) > 1 or span > outer.pop()[1]:
            break
        parts = inner
    return parts


def _runs(parts: list[Placement]) -> tuple[Int64s, Int64s, Int64s]:
    count = sum(part.count for part in parts)
    if count > _MOST_RUNS:
        problem = f"The overlap check is limited to {_MOST_RUNS:,} runs that share no outer axis"
        got, hint = f"{count:,} runs", "Give all parts the same block axis"
        raise AtlasError(Code.UNDECIDED, problem, got=got, hint=hint)
    starts, lengths = zip(*(part.runs() for part in parts), strict=True)
    owners = np.repeat(np.arange(len(parts)), [len(some) for some in starts])
    return np.concatenate(starts), np.concatenate(lengths), owners


def _first_hole(parts: Mapping[str, Placement]) -> str:
    if not parts or sum(part.folded().count for part in parts.values()) > 1 << 20:
        return ""
    starts, lengths, _ = _runs([part.folded() for part in parts.values()])
    starts, lengths = join_ranges(starts, lengths)
    return f", the first at byte {0 if starts[0] else int(lengths[0])}"


def keeps_to_its_blocks(placement: Placement, cell: int, blocks: int) -> bool:
    """Return whether every block of a placement uses only its own part of the buffer.

    The buffer is divided into segments of `cell` bytes, and segment i belongs to block i % blocks.
    If the result is true for all groups that overlay each other in a pool, these groups can hold
    different blocks at the same time.

    >>> rows = Placement.packed([("L", 2), ("B", 4)], item=64)
    >>> keeps_to_its_blocks(rows, 64, 4), keeps_to_its_blocks(rows.shift(32), 64, 4)
    (True, False)
    """
    if blocks == 1:
        return True  # there is no other block to overlap
    if placement.size("B") > 1 and placement.stride("B") != cell:
        return False
    if stays_in_its_cell(placement, cell, blocks):
        return True
    one = placement.select("B", 0)
    if one.folded().count > _MOST_RUNS:
        problem = f"The overlap check is limited to {_MOST_RUNS:,} runs in a block"
        got, hint = (
            f"{one.folded().count:,} runs of {one}",
            "Use a layout with fewer runs per block",
        )
        raise AtlasError(Code.UNDECIDED, problem, got=got, hint=hint)
    starts, lengths = one.runs()
    first, last = starts // cell, (starts + lengths - 1) // cell
    return bool(((first == last) & (first % blocks == 0)).all())


def stays_in_its_cell(placement: Placement, cell: int, blocks: int) -> bool:
    """Return whether the strides show that each block stays in one segment of `cell` bytes.

    If the result is true, `keeps_to_its_blocks` is true as well. This check needs no search.
    """
    # Strides that are multiples of cell * blocks stay in the same block; the sum of all
    # other steps must stay inside one cell.
    one = placement.select("B", 0)
    inside = sum(
        (n - 1) * s for n, s in zip(one.sizes, one.strides, strict=True) if s % (cell * blocks)
    )
    return one.offset // cell % blocks == 0 and one.offset % cell + inside + one.item <= cell
