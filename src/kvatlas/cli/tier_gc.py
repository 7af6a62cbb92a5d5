"""`kvatlas tier gc`: remove objects that no engine uses."""

from __future__ import annotations

from typing import Annotated

import typer

from kvatlas.cli.app import Json, answer
from kvatlas.cli.tables import table
from kvatlas.cli.tier_app import Where, opened
from kvatlas.geometry.byte_sizes import size

Tenant = Annotated[
    str, typer.Option(help="Remove all objects of this tenant: a digest from `tier ls`.")
]
Space = Annotated[str, typer.Option(help="Remove this namespace: a digest from `tier ls`.")]
Older = Annotated[
    bool, typer.Option("--older", help="Remove objects in older formats, which are never read.")
]


def gc(
    where: Where,
    tenant: Tenant = "",
    namespace: Space = "",
    older: Older = False,
    as_json: Json = False,
) -> None:
    """Remove incomplete rows, and temporary files of processes that have died.

    A row is one stored block, split into several objects. With --tenant or --namespace, remove all
    objects of that tenant or namespace instead; with --older, remove all objects in older formats.
    """
    from kvatlas.tier.store_inspection import collect_garbage

    with opened(where) as store:
        removed, swept = collect_garbage(store, tenant=tenant, namespace=namespace, older=older)
    shown = table("objects removed", "leftover bytes removed", words=())
    shown.add_row(f"{removed:,}", size(swept))
    answer(as_json, {"objects": removed, "left_bytes": swept}, shown)
