"""The typer application, and the function that prints a command's result."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated

import msgspec
import typer
from rich.console import RenderableType

import kvatlas
from kvatlas.cli.failures import guarded
from kvatlas.cli.tables import show

_HELP = "Plan, explain, draw and move the KV caches of large language models."

app = typer.Typer(
    name="kvatlas",
    help=_HELP,
    epilog="[dim]Example[/]  kvatlas plan Qwen3.5-397B-A17B --tp 2 --memory 60GiB",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def command(*examples: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that registers a command, with examples below its help.

    Errors of the command become messages and exit codes.
    """
    lines = ("[dim]Examples[/]", *(f"  kvatlas {line}" for line in examples))
    epilog = "\n".join(lines)

    def register(function: Callable[..., None]) -> Callable[..., None]:
        return app.command(epilog=epilog, help=help_text(function))(guarded(function))

    return register


def help_text(function: Callable[..., None]) -> str:
    """Return a command's docstring with one line per paragraph, so that typer can wrap it."""
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvatlas {kvatlas.__version__}")
        raise typer.Exit


def answer(as_json: bool, value: object, *parts: RenderableType) -> None:
    """Print `value` as JSON if `as_json` is true, otherwise print `parts`.

    `parts` show the same data as text and tables.
    """
    if as_json:
        # Bytes are written without the terminal's encoding, so the output is always valid JSON.
        typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))
    else:
        show(*parts)


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Plan, explain, draw and move the KV caches of large language models."""
