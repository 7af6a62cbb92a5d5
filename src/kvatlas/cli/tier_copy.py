"""`kvatlas tier copy`: copy the rows of a prefix to another store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvatlas.cli.app import Json, answer
from kvatlas.cli.failures import plain
from kvatlas.cli.progress import progress_bar
from kvatlas.cli.tables import table
from kvatlas.cli.tier_app import Where, opened
from kvatlas.geometry.byte_sizes import size

Prefix = Annotated[
    Path, typer.Option(help="A JSON file with the token ids of the prefix.", show_default=False)
]
To = Annotated[str, typer.Option(help="Address of the other store.", show_default=False)]
Salt = Annotated[str, typer.Option(help="The cache salt of the requests.")]
Lora = Annotated[str, typer.Option(help="The adapter of the requests.")]
Tenant = Annotated[str, typer.Option(help="Copy only this tenant: a digest from `tier ls`.")]
Space = Annotated[str, typer.Option(help="Copy only this namespace: a digest from `tier ls`.")]


def copy(
    where: Where,
    prefix: Prefix,
    to: To,
    salt: Salt = "",
    lora: Lora = "",
    tenant: Tenant = "",
    namespace: Space = "",
    as_json: Json = False,
) -> None:
    """Copy the rows of a prefix to another store, before requests need them there.

    The copy can be interrupted at any time, and a second call continues it. Exits with 1 if
    objects are damaged or the other store has no space for them.
    """
    from kvatlas.tier.store_inspection import copy_prefix

    tokens = _tokens(prefix)
    with (
        opened(where) as store,
        opened(to, create=True) as other,
        progress_bar("copying rows") as progress,
    ):
        done = copy_prefix(
            store, other, tokens,
            salt=salt.encode(), lora=lora, tenant=tenant, namespace=namespace, progress=progress,
        )  # fmt: skip
    shown = table("objects copied", "bytes", "already there", "refused", words=())
    shown.add_row(
        f"{done.copied:,}", size(done.nbytes), f"{done.existing:,}", f"{len(done.refused):,}"
    )
    answer(as_json, done._asdict(), shown, *map(plain, done.refused[:20]))
    if done.refused:
        raise typer.Exit(1)


def _tokens(path: Path) -> list[int]:
    """Read a JSON list of token ids."""
    import msgspec

    from kvatlas.errors import AtlasError, Code

    try:
        return msgspec.json.decode(path.read_bytes(), type=list[int])
    except (OSError, msgspec.DecodeError) as fault:
        problem = "The tokens of the prefix cannot be read"
        hint = "Write the token ids as a JSON list, such as [1, 2, 3]"
        raise AtlasError(Code.UNREADABLE, problem, got=f"{path}: {fault}", hint=hint) from None
