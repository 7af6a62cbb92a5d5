"""`kvatlas tier ls`: whose rows a store has."""

from __future__ import annotations

from kvatlas.cli.app import Json, answer
from kvatlas.cli.failures import plain
from kvatlas.cli.tables import table
from kvatlas.cli.tier_app import Where, opened
from kvatlas.geometry.byte_sizes import size


def ls(where: Where, as_json: Json = False) -> None:
    """Namespaces of a store: tenant, model, rows and bytes of each."""
    from kvatlas.tier import summaries

    with opened(where) as store:
        found = summaries(store)
    shown = table("tenant", "namespace", "model", "rows", "incomplete", "objects", "bytes",
                  words=(0, 1, 2), wraps=(0, 1))  # fmt: skip
    for one in found:
        numbers = (f"{one.rows:,}", f"{one.incomplete:,}", f"{one.objects:,}", size(one.nbytes))
        shown.add_row(one.tenant, one.namespace, plain(one.model), *numbers)
    answer(as_json, {"namespaces": found}, shown)
