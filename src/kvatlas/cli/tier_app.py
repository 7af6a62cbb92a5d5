"""`kvatlas tier`: the group of commands that manage a tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from kvatlas.cli.app import help_text
from kvatlas.cli.failures import guarded

if TYPE_CHECKING:
    from kvatlas.tier import ObjectStore

tier_app = typer.Typer(
    name="tier",
    help="Manage a tier: storage for prefixes that engines share.",
    no_args_is_help=True,
)

Where = Annotated[
    str,
    typer.Argument(
        metavar="STORE",
        help="Address of the store: folder:///path or mooncake://host:port?metrics=host:9003",
        show_default=False,
    ),
]


def tier_command(name: str, *examples: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that registers `kvatlas tier NAME`, with examples below its help.

    Errors of the command become messages and exit codes.
    """
    lines = ("[dim]Examples[/]", *(f"  kvatlas tier {line}" for line in examples))
    epilog = "\n".join(lines)

    def register(function: Callable[..., None]) -> Callable[..., None]:
        return tier_app.command(name, epilog=epilog, help=help_text(function))(guarded(function))

    return register


@contextmanager
def opened(where: str, *, create: bool = False) -> Iterator[ObjectStore]:
    """Yield the open store at an address, and close it at the end.

    If `create` is true, a missing folder is created.
    """
    from kvatlas.tier import open_store

    store = open_store(where, create=create)
    try:
        yield store
    finally:
        store.close()
