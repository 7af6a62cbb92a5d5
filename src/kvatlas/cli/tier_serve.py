"""`kvatlas tier serve`: serve a tier's file to engines."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from kvatlas.cli.failures import plain

_BLOCK = 64
"""Tokens per block of a new tier. Engines have the same default."""


def serve(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="The tier's file.", show_default=False)
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="If the file does not exist, create it for this model.", show_default=False
        ),
    ] = None,
    memory: Annotated[str, typer.Option(help="Size of a new file.")] = "4GiB",
    max_len: Annotated[
        int | None, typer.Option(help="Tokens of the longest request in a new file.")
    ] = None,
    durable: Annotated[
        bool, typer.Option(help="Sync to disk, so that stored blocks survive a power failure.")
    ] = False,
) -> None:
    """Serve a tier's file to all processes of this user on this host, until interrupted.

    This command is optional: without it, the first engine that opens the path serves it.
    """
    from kvatlas.planning import plan
    from kvatlas.tier import Tier, TierServer

    made = None
    if model is not None and not path.exists():
        made = plan(
            model, memory=memory, layout="BLHNC", block_size=_BLOCK, max_len=max_len, in_flight=0
        )
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    with Tier.open(path, made, durable=durable) as tier, TierServer(tier) as server:
        typer.echo(f"Serving {plain(tier.plan)} at {plain(server.path)}")
        stopped.wait()
