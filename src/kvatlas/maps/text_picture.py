"""A block in letters: each column is a stretch of bytes, each row contiguous memory."""

from __future__ import annotations

from kvatlas.maps.block_picture import GroupRows, RowSample, sampled_groups, short_label
from kvatlas.maps.map_data import MapData
from kvatlas.planning import size

_HEADS = "0123456789abcdefghijklmnopqrstuvwxyz"
_LABEL = 12


def text_picture(data: MapData, plan: int, width: int = 80) -> str:
    """A plan's blocks for a terminal, readable without colour."""
    drawn = data.plans[plan]
    columns = max(16, width - _LABEL - 2 - len(" ..."))
    lines = [drawn.label, drawn.answer]
    for pool in drawn.pools:
        stage = f" of stage {pool['stage']}" if drawn.ranks > drawn.tp else ""
        blocks = f"{pool['blocks']:,} blocks of {pool['block_bytes']:,} bytes"
        lines.append(f"Pool {pool['index']}{stage}: {blocks}, {pool['size']}.")
    for group in sampled_groups(drawn, data.names, columns, by_piece=True):
        lines += ["", *_group(drawn.groups[group.group], group)]
    return "\n".join(lines) + "\n"


def _group(summary: dict[str, object], group: GroupRows) -> list[str]:
    times = f"{group.times} x " if group.times > 1 else ""
    heads = max((int(row.head.max()) + 1 for row in group.rows if row.page), default=1)
    fields = dict.fromkeys(
        field.name for row in group.rows if row.page for field in row.page.fields
    )
    by_head = 1 < heads <= len(_HEADS)
    lines = [f"{times}{summary['kind']}: a block of {summary['block_size']} tokens"]
    lines += [f"{short_label(row.label):>{_LABEL}}  {_letters(row, by_head)}" for row in group.rows]
    if group.left_out:
        lines.append(f"{'':>{_LABEL}}  and {group.left_out} more rows")
    letters = ", ".join(f"{name[0]} {name}" for name in fields if not name.startswith("pad"))
    what = "digits are heads" if by_head else f"letters are fields ({letters})"
    each = size(group.each)
    lines.append(f"{'':>{_LABEL}}  {what}, dots padding; a letter is {each}, ... goes on")
    return lines


def _letters(row: RowSample, by_head: bool) -> str:
    letters = [field.name[0] for field in row.page.fields] if row.page else []
    text = "".join(
        "." if field < 0 else (_HEADS[head] if by_head else letters[field])
        for field, head in zip(row.field.tolist(), row.head.tolist(), strict=True)
    )
    return text + " ..." * row.goes_on
