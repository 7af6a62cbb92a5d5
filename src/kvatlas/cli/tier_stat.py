"""`kvatlas tier stat`: show how full a store is."""

from __future__ import annotations

from kvatlas.cli.app import Json, answer
from kvatlas.cli.tables import table
from kvatlas.cli.tier_app import Where, opened
from kvatlas.geometry.byte_sizes import size


def stat(where: Where, as_json: Json = False) -> None:
    """Show the number of objects, the bytes in use and the capacity of a store."""
    with opened(where) as store:
        room = store.capacity()
    shown = table("objects", "bytes", "capacity", words=())
    shown.add_row(f"{room.objects:,}", size(room.used), size(room.total) if room.total else "?")
    answer(as_json, room._asdict(), shown)
