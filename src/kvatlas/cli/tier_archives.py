"""`kvatlas tier export` and `import`: copy the objects of a store to a tar file and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvatlas.cli.app import Json, answer
from kvatlas.cli.failures import plain
from kvatlas.cli.tables import table
from kvatlas.cli.tier_app import Where, opened

Archive = Annotated[Path, typer.Argument(metavar="FILE", help="The tar file.", show_default=False)]


def export(where: Where, archive: Archive, as_json: Json = False) -> None:
    """Write all valid objects of a store to a tar file."""
    from kvatlas.tier.store_inspection import export_objects

    with opened(where) as store:
        count = export_objects(store, archive)
    shown = table("objects written", words=())
    shown.add_row(f"{count:,}")
    answer(as_json, {"objects": count}, shown)


def import_archive(where: Where, archive: Archive, as_json: Json = False) -> None:
    """Store the valid objects of a tar file. Exits with 1 if some objects are damaged."""
    from kvatlas.tier.store_inspection import import_objects

    with opened(where, create=True) as store:
        verdict = import_objects(store, archive)
    shown = table("objects stored", "damaged", words=())
    shown.add_row(f"{verdict.sound:,}", f"{len(verdict.damaged):,}")
    value = {"stored": verdict.sound, "refused": verdict.damaged}
    answer(as_json, value, shown, *map(plain, verdict.damaged[:20]))
    if verdict.damaged:
        raise typer.Exit(1)
