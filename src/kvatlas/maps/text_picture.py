"""Draw a block with characters. A row is a contiguous byte range; a character is a part of it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from string import ascii_uppercase
from textwrap import wrap

from kvatlas.geometry.byte_sizes import size
from kvatlas.maps.block_picture import GroupRows, RowSample, nesting, sampled_groups, short_label
from kvatlas.maps.map_data import MapData
from kvatlas.maps.plan_drawing import FieldDrawing

_HEADS = "0123456789abcdefghijklmnopqrstuvwxyz"
_LONGEST_LABEL = 20


def text_picture(data: MapData, plan: int, width: int = 80) -> str:
    """Return a drawing of one block of each group, for a terminal without colours."""
    drawn = data.plans[plan]
    labels = [len(short_label(name)) for name in (*data.names, "unused")]
    label = min(_LONGEST_LABEL, max(labels))
    columns = max(16, width - label - 2 - len(" ..."))
    lines = [*wrap(drawn.label, width), *wrap(drawn.answer, width)]
    for pool in drawn.pools:
        stage = f" of stage {pool['stage']}" if drawn.ranks > drawn.tp else ""
        blocks = f"{pool['blocks']:,} blocks of {pool['block_bytes']:,} bytes"
        lines.append(f"Pool {pool['index']}{stage}: {blocks}, {pool['size']}.")
    for group in sampled_groups(drawn, data.names, columns, piece_columns=1):
        lines += ["", *_group(drawn.groups[group.group], group, label, width)]
    return "\n".join(lines) + "\n"


def _group(summary: dict[str, object], group: GroupRows, label: int, width: int) -> list[str]:
    times = f"{group.times} x " if group.times > 1 else ""
    fields = {field.name: field for row in group.rows if row.page for field in row.page.fields}
    named = [field for field in fields.values() if not field.padding]
    by_head = 1 < group.heads <= len(_HEADS)
    letters = _letters([field for field in named if not (by_head and _has_heads(field))])
    lines = [f"{times}{summary['kind']}: a block of {summary['block_size']} tokens"]
    lines += wrap(f"{nesting(group.field)}.", width, initial_indent="  ", subsequent_indent="  ")
    for line, (first, *others) in _alike(group.rows, letters):
        lines.append(f"{short_label(first.label)[:label]:>{label}}  {line}")
        more = len(others) + sum(row.more for row in (first, *others))
        if more:
            lines.append(f"{'':>{label}}  {more} more {'rows' if more > 1 else 'row'} like this")
    told = ["digits are heads"] if by_head else []
    told += [f"{letter} is {name}" for name, letter in letters.items() if letter != name]
    if any((row.field < 0).any() for row in group.rows):
        told.append("dots are padding or unused")
    told.append(f"each character is {size(group.each)}")
    if any(row.goes_on for row in group.rows):
        told.append("... means that the row continues")
    indent = " " * (label + 2)
    return lines + wrap(", ".join(told), width, initial_indent=indent, subsequent_indent=indent)


def _has_heads(field: FieldDrawing) -> bool:
    return any(axis == "H" for axis, *_ in field.box.axes)


def _letters(fields: list[FieldDrawing]) -> dict[str, str]:
    """Return a letter for each field, if possible a letter of its name."""
    taken: dict[str, str] = {}
    for field in fields:
        free = [one for one in field.name + ascii_uppercase if one not in taken.values()]
        taken[field.name] = next(one for one in free if one.isalpha())
    return taken


def _alike(rows: list[RowSample], letters: dict[str, str]) -> Iterator[tuple[str, list[RowSample]]]:
    """Yield (drawn line, rows) for each run of consecutive rows that look the same."""
    for line, same in groupby(rows, key=lambda row: _line(row, letters)):
        yield line, list(same)


def _line(row: RowSample, letters: dict[str, str]) -> str:
    names = [field.name for field in row.page.fields] if row.page else []
    text = "".join(
        "." if field < 0 else letters.get(names[field]) or _HEADS[head]
        for field, head in zip(row.field.tolist(), row.head.tolist(), strict=True)
    )
    return text + " ..." * row.goes_on
