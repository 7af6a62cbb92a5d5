"""`kvatlas trace`: print what a trace contains."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from kvatlas.cli.app import Json, answer
from kvatlas.cli.failures import plain
from kvatlas.cli.options import TokenizerOption
from kvatlas.cli.progress import progress_bar
from kvatlas.cli.tables import indented, notes, table

if TYPE_CHECKING:
    from kvatlas.simulate import TraceFacts

__all__ = ["trace"]


def trace(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A trace, plain or compressed (.gz, .zst), or a folder of conversations.",
            show_default=False,
        ),
    ],
    trace_block: Annotated[
        int | None,
        typer.Option(
            help="Tokens that each id represents; for tokens and text, tokens per compared block. "
            "[dim]By default 512 in Mooncake's format, else 16.[/]"
        ),
    ] = None,
    tokenizer: TokenizerOption = None,
    as_json: Json = False,
) -> None:
    """Print what a trace contains: requests, arrival rate, lengths, and reuse of prefixes.

    Formats: Mooncake (also with the fields of AIPerf and Dynamo), Bailian, conversations of coding
    agents, ShareGPT, OpenAI chat and batch requests, prompts as token ids or text, LMCache, request
    logs of vLLM and SGLang, KV events, and the tables of Azure and BurstGPT.
    """
    from kvatlas.simulate import read_trace, trace_facts

    with progress_bar(f"Reading {plain(path.name)}") as told:
        read = read_trace(path, block=trace_block, tokenizer=tokenizer, progress=told)
    facts = trace_facts(read)
    answer(as_json, facts, *_parts(facts))


def _parts(facts: TraceFacts) -> list[RenderableType]:
    title = Text(plain(facts.name), style="bold")
    title.append(
        f"  {facts.requests:,} requests, {facts.prompt_tokens:,} prompt tokens", "not bold dim"
    )
    sentences = [_arrivals(facts), *_sharing(facts)]
    made = table("", "p50", "p90", "p99", "max")
    made.add_row("prompt tokens", *(f"{value:,}" for value in facts.prompt_lengths.values()))
    made.add_row("output tokens", *(f"{value:,}" for value in facts.output_lengths.values()))
    if facts.reuse:
        reuse = facts.reuse
        made.add_row("seconds to reuse", *(f"{value:,.1f}" for value in reuse.seconds.values()))
        made.add_row("requests between", *(f"{value:,}" for value in reuse.requests.values()))
        made.add_row("new tokens between", *(f"{value:,}" for value in reuse.new_tokens.values()))
    legend = (
        "seconds to reuse: time since the last request with the longest shared prefix. between: "
        "requests since then, and the tokens that they used for the first time; a cache with LRU "
        "eviction must hold at least these tokens to keep the prefix."
    )
    shown = [Text(legend, style="dim")] if facts.reuse else []
    return [title, Text(" ".join(sentences)), indented(made), *notes(facts.notes), *shown]


def _arrivals(facts: TraceFacts) -> str:
    if facts.requests_per_second is None:
        return "Arrival times are unknown."
    return (
        f"{facts.requests_per_second:,.3g} requests per second over {facts.duration:,.0f} s; "
        f"{facts.busiest_minute:,} in the busiest minute."
    )


def _sharing(facts: TraceFacts) -> list[str]:
    if facts.shared_tokens is None:
        return []
    return [
        f"{facts.shared_tokens:.1%} of the prompt tokens, in {facts.shared_requests:.1%} of the "
        f"requests, are in a prefix of an earlier request, in whole blocks of {facts.block:,} "
        f"tokens. {facts.distinct_tokens:,} tokens are distinct."
    ]
