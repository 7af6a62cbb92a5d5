"""`kvatlas tier serve`: a process that does nothing but serve a tier's file to engines."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from kvatlas.cli.failures import plain

_BLOCK = 64
"""Tokens of a new tier's blocks, as engines make them."""


def serve(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="The tier's file.", show_default=False)
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Where the file is absent, make it for this model.", show_default=False),
    ] = None,
    memory: Annotated[str, typer.Option(help="The size of a new file.")] = "4GiB",
    max_len: Annotated[int | None, typer.Option(help="The longest request of a new file.")] = None,
    durable: Annotated[
        bool, typer.Option(help="Have what is stored outlive a power cut, too.")
    ] = False,
) -> None:
    """Serve a tier's file to all processes of this user on this host, until interrupted.

    Engines that name the same path need no such process: the first of them serves it.
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
