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
    """List the namespaces of a store, with tenant, model, rows and bytes."""
    from kvatlas.tier import summaries

    with opened(where) as store:
        found = summaries(store)
    shown, console = _table(found, stacked=False), Console()
    if shown.natural_width(console, 1) > console.width:
        shown = _table(found, stacked=True)
    answer(as_json, {"namespaces": found}, shown if found else "The store is empty.")


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
