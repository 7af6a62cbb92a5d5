"""`kvatlas tier verify`: check the integrity of all objects of a store."""

from __future__ import annotations

from typing import Annotated

import typer

from kvatlas.cli.app import Json, answer
from kvatlas.cli.failures import plain
from kvatlas.cli.tables import table
from kvatlas.cli.tier_app import Where, opened

Remove = Annotated[bool, typer.Option("--remove", help="Remove damaged objects.")]


def verify_objects(where: Where, remove: Remove = False, as_json: Json = False) -> None:
    """Check name, header and checksum of every object. Exits with 1 if some are damaged."""
    from kvatlas.tier.store_inspection import verify

    with opened(where) as store:
        verdict = verify(store, remove=remove)
    shown = table("valid", "damaged", words=())
    shown.add_row(f"{verdict.sound:,}", f"{len(verdict.damaged):,}")
    answer(as_json, verdict._asdict(), shown, *map(plain, verdict.damaged[:20]))
    if verdict.damaged:
        raise typer.Exit(1)
