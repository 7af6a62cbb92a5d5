"""`kvatlas tier ls`: list the namespaces of a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from kvatlas.cli.app import Json, answer
from kvatlas.cli.failures import plain
from kvatlas.cli.fitted_table import FittedTable
from kvatlas.cli.tables import table
from kvatlas.cli.tier_app import Where, opened
from kvatlas.geometry.byte_sizes import size

if TYPE_CHECKING:
    from kvatlas.tier.store_inspection import NamespaceSummary

_NAMES, _NUMBERS = ("model", "tenant", "namespace"), ("rows", "incomplete", "objects", "bytes")


def ls(where: Where, as_json: Json = False) -> None:
    """List the namespaces of a store, with tenant, model, rows and bytes.

    Objects in older formats, which this version never reads, are counted separately.
    """
    from kvatlas.tier.store_inspection import older_objects, summaries

    with opened(where) as store:
        found = summaries(store)
        older, older_bytes = older_objects(store)
    shown, console = _table(found, stacked=False), Console()
    if shown.natural_width(console, 1) > console.width:
        shown = _table(found, stacked=True)
    parts = [shown] if found else [] if older else ["The store is empty."]
    notes = [_older(older, older_bytes)] if older else []
    about = {"namespaces": found, "older_objects": older, "older_bytes": older_bytes}
    answer(as_json, about, *parts, *notes)


def _older(objects: int, nbytes: int) -> str:
    return (
        f"{objects:,} objects of {size(nbytes)} are in an older format and are never read. "
        "Remove them with `kvatlas tier gc --older`."
    )


def _table(found: list[NamespaceSummary], *, stacked: bool) -> FittedTable:
    """Return a table of namespaces, with columns for model, tenant and namespace.

    If `stacked` is true, these three are in one column, one below the other.
    """
    columns = ("\n".join(_NAMES),) if stacked else _NAMES
    shown = table(*columns, *_NUMBERS, words=range(len(columns)), wraps=(0,))
    for one in found:
        names = (plain(one.model), one.tenant, one.namespace)
        numbers = (f"{one.rows:,}", f"{one.incomplete:,}", f"{one.objects:,}", size(one.nbytes))
        shown.add_row(*(["\n".join(names)] if stacked else names), *numbers)
    return shown
