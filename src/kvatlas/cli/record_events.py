"""`kvatlas events`: what an engine says of its cache while it runs, recorded as a trace."""

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
"""Seconds after which it looks whether it is to end."""


def events(
    endpoint: Annotated[
        str,
        typer.Argument(
            help="Where the engine publishes: tcp://127.0.0.1:5557. Each data-parallel rank has "
            "an address of its own.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="A new file.", show_default=False)],
    replay: Annotated[
        str | None,
        typer.Option(help="Where it sends again what was missed, from before this began too."),
    ] = None,
    topic: Annotated[str, typer.Option(help="How the topics that count begin.")] = "",
    seconds: Annotated[float | None, typer.Option(help="Stop after so long.", min=0)] = None,
    batches: Annotated[int | None, typer.Option(help="Stop after so many batches.", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Record a running engine's KV events, as a trace for `simulate` and `plan --trace`.

    vLLM sends them with --kv-events-config '{"enable_kv_cache_events": true}'. Every batch is
    written as it comes, until Ctrl-C, --seconds or --batches. The file holds the prompts' tokens.
    """
    from kvatlas.pool import EventRecording, EventSubscriber

    with EventSubscriber(endpoint, replay=replay, topic=topic) as subscriber:
        with EventRecording(output) as recording, _stopping() as stopped:
            if not as_json:
                typer.echo(f"Recording {plain(endpoint)} to {plain(output)}. Ctrl-C ends it.")
            try:
                refused = _record(subscriber, recording, stopped, seconds, batches)
            finally:
                if not recording.batches:
                    output.unlink()
        if not recording.batches:
            hint = "Is the engine busy, and were its events turned on?"
            raise AtlasError(Code.DEADLINE, "No batch of events came", got=endpoint, hint=hint)
    facts = {name: getattr(recording, name) for name in ("batches", "events", "gaps", "bytes")}
    facts["refused"] = refused
    said = f"{recording.batches:,} batches, {recording.events:,} events, {recording.bytes:,} bytes"
    places = "1 place" if recording.gaps == 1 else f"{recording.gaps:,} places"
    lost = f"Batches are missing at {places}, before the first perhaps. --replay asks for them "
    lost += "again, of an engine that keeps some."
    told = [lost] if recording.gaps else []
    if refused:
        told.append(f"Left out as no batches of KV events that vLLM 0.32 sends: {refused:,}.")
    answer(as_json, facts, Text(said), *notes(told))


def _record(
    subscriber: EventSubscriber,
    recording: EventRecording,
    stopped: threading.Event,
    seconds: float | None,
    batches: int | None,
) -> int:
    """Write what comes until it is time to end; how much of it was no batch."""
    refused = 0
    end = float("inf") if seconds is None else time.monotonic() + seconds
    while not stopped.is_set() and recording.batches != batches and time.monotonic() < end:
        try:
            received = subscriber.read(min(_TICK, max(0.0, end - time.monotonic())))
        except AtlasError as refusal:
            if refusal.code is not Code.BAD_HANDSHAKE or not recording.batches:
                raise
            refused += 1  # an engine that was understood before: the next is behind a gap
            continue
        if received is not None:
            recording.write(received)
    return refused


@contextmanager
def _stopping() -> Iterator[threading.Event]:
    """Set when somebody presses Ctrl-C or ends the process."""
    stopped = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: stopped.set()) for number in numbers]
    try:
        yield stopped
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
