"""`kvatlas tier gc`: room that nobody has use for."""

from __future__ import annotations

from typing import Annotated

import typer

from kvatlas.cli.app import Json, answer
from kvatlas.cli.tables import table
from kvatlas.cli.tier_app import Where, opened
from kvatlas.geometry.byte_sizes import size

Tenant = Annotated[str, typer.Option(help="Remove all of a tenant, by its digest of `tier ls`.")]
Space = Annotated[str, typer.Option(help="Remove a namespace, by its digest of `tier ls`.")]


def gc(where: Where, tenant: Tenant = "", namespace: Space = "", as_json: Json = False) -> None:
    """Remove rows that lack objects, and what dead writers left; or a tenant, or a namespace."""
    from kvatlas.tier import collect_garbage

    with opened(where) as store:
        removed, swept = collect_garbage(store, tenant=tenant, namespace=namespace)
    shown = table("objects removed", "left by dead writers", words=())
    shown.add_row(f"{removed:,}", size(swept))
    answer(as_json, {"objects": removed, "left_bytes": swept}, shown)
