"""`kvatlas events`: record the KV events of a running engine as a trace."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from kvatlas.cli.app import Json, answer
from kvatlas.cli.failures import plain
from kvatlas.cli.tables import notes
from kvatlas.errors import AtlasError, Code

if TYPE_CHECKING:
    from kvatlas.pool import EventRecording, EventSubscriber

_TICK = 0.2
"""Seconds between checks whether the recording should stop."""


def events(
    endpoint: Annotated[
        str,
        typer.Argument(
            metavar="ENDPOINT",
            help="Address where the engine publishes: tcp://127.0.0.1:5557. Each data-parallel "
            "rank has its own address.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The file to create.", show_default=False)
    ],
    replay: Annotated[
        str | None,
        typer.Option(
            help="Address where the engine resends batches, to get missed and earlier ones."
        ),
    ] = None,
    topic: Annotated[str, typer.Option(help="Record only topics with this prefix.")] = "",
    seconds: Annotated[
        float | None, typer.Option(help="Stop after this many seconds.", min=0)
    ] = None,
    batches: Annotated[
        int | None, typer.Option(help="Stop after this many batches.", min=1)
    ] = None,
    as_json: Json = False,
) -> None:
    """Record a running engine's KV events, as a trace for `simulate` and `plan --trace`.

    vLLM publishes events with --kv-events-config '{"enable_kv_cache_events": true}'. Each batch
    is written when it arrives. The recording ends after Ctrl-C, --seconds or --batches. The file
    contains the tokens of the prompts.
    """
    from kvatlas.pool import EventRecording, EventSubscriber

    with EventSubscriber(endpoint, replay=replay, topic=topic) as subscriber:
        with EventRecording(output) as recording, _stopping() as stopped:
            if not as_json:
                typer.echo(f"Recording {plain(endpoint)} to {plain(output)}. Press Ctrl-C to stop.")
            try:
                refused = _record(subscriber, recording, stopped, seconds, batches)
            finally:
                if not recording.batches:
                    output.unlink()
        if not recording.batches:
            hint = "Check that the engine is serving requests and that its KV events are enabled"
            problem = "No batch of events arrived before the recording stopped"
            got = f"no batch from {endpoint}"
            raise AtlasError(Code.DEADLINE, problem, got=got, hint=hint)
    facts = {name: getattr(recording, name) for name in ("batches", "events", "gaps", "bytes")}
    facts["refused"] = refused
    said = f"{recording.batches:,} batches, {recording.events:,} events, {recording.bytes:,} bytes"
    places = "1 place" if recording.gaps == 1 else f"{recording.gaps:,} places"
    lost = f"Batches are missing at {places}, possibly before the first. If the engine keeps old "
    lost += "batches, --replay requests them."
    told = [lost] if recording.gaps else []
    if refused:
        told.append(f"Skipped {refused:,} messages that are not KV event batches of vLLM 0.32.")
    answer(as_json, facts, Text(said), *notes(told))


def _record(
    subscriber: EventSubscriber,
    recording: EventRecording,
    stopped: threading.Event,
    seconds: float | None,
    batches: int | None,
) -> int:
    """Record batches until `stopped` is set or a limit is reached.

    Return the number of malformed messages.
    """
    refused = 0
    end = float("inf") if seconds is None else time.monotonic() + seconds
    while not stopped.is_set() and recording.batches != batches and time.monotonic() < end:
        try:
            received = subscriber.read(min(_TICK, max(0.0, end - time.monotonic())))
        except AtlasError as refusal:
            if refusal.code is not Code.BAD_HANDSHAKE or not recording.batches:
                raise
            refused += 1  # the skipped message becomes a gap
            continue
        if received is not None:
            recording.write(received)
    return refused


@contextmanager
def _stopping() -> Iterator[threading.Event]:
    """Yield an event that SIGINT or SIGTERM sets."""
    stopped = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: stopped.set()) for number in numbers]
    try:
        yield stopped
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
