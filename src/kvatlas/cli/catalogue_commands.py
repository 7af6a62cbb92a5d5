"""The commands `models`, `layouts` and `hybrids`, which list what kvatlas supports."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer
from rich.text import Text

from kvatlas.cli.app import Json, answer
from kvatlas.cli.failures import plain
from kvatlas.cli.hybrids_page import hybrids_page
from kvatlas.cli.model_facts import layer_facts, layout_facts, model_facts
from kvatlas.cli.options import MODEL
from kvatlas.cli.tables import indented, notes, table, tokens
from kvatlas.geometry.byte_sizes import size
from kvatlas.models import Model, catalogue
from kvatlas.planning import BACKENDS

_NARROW = 16
"""Width of the column `layers`, which lists layer kinds, in a terminal of 80 columns."""


_VERIFY = "Compare each layer of the model with what transformers caches; a difference is an error."


def models(
    name: Annotated[str | None, MODEL] = None,
    verify: Annotated[bool, typer.Option("--verify", help=_VERIFY)] = False,
    as_json: Json = False,
) -> None:
    """List the known models, or show what each layer of one model caches."""
    if name is not None:
        model = Model.load(name, oracle="transformers" if verify else None)
        _one_model(model, as_json=as_json)
        return
    facts = [model_facts(Model.load(known)) for known in catalogue()]
    columns = ("model", "layers", "B/token", "fixed", "max len", "trust")
    made = table(*columns, words=(0, 1, 5), wraps=(1,))
    for fact in facts:
        made.add_row(
            Text(fact["name"], style="bold"),
            _kinds(fact["layers"]),
            *_sizes(fact),
            tokens(fact["max_len"]) if fact["max_len"] else "-",
            fact["confidence"],
        )
    legend = (
        "B/token: bytes that each token adds. fixed: bytes that a request takes at any length, "
        "for windows and recurrent states. trust: confidence in the numbers. All at tp 1."
    )
    answer(as_json, {"models": facts}, made, Text(legend, style="dim"))


def _one_model(model: Model, *, as_json: bool) -> None:
    facts, layers = model_facts(model), layer_facts(model)
    title = Text(plain(model.name), style="bold")
    title.append(f"  {plain(model.architecture)}, {model.depth} layers", style="not bold dim")
    columns = ("layers", "count", "B/token", "fixed", "cache of each layer")
    made = table(*columns, words=(0, 4), wraps=(0, 4))
    specs = dict.fromkeys(layer.spec for layer in model.layers)
    for row, spec in zip(layers, specs, strict=True):
        made.add_row(row["layers"], str(row["num_layers"]), *_sizes(row), _spec(spec))
    length = f"at most {model.max_len:,} tokens" if model.max_len else "any length"
    total = f"{facts['bytes_per_token']:,} bytes per token, "
    total += f"{facts['fixed_bytes_per_request']:,} bytes per request; {length}."
    source = [Text(f"Source: {plain(model.source)}", style="dim")] if model.source else []
    parts = (title, indented(made), Text(total), *notes(model.warnings), *source)
    answer(as_json, {**facts, "caches": layers}, *parts)


def _sizes(fact: dict[str, Any]) -> tuple[str, str]:
    each, fixed = fact["bytes_per_token"], fact["fixed_bytes_per_request"]
    return f"{each:,.0f}" if each else "-", size(fixed) if fixed else "-"


def _kinds(layers: dict[str, int]) -> str:
    short = (("_attention", ""), ("sliding_window", "sliding"), ("chunked_local", "chunked"))
    words = []
    for kind, number in layers.items():
        for long, brief in short:
            kind = kind.replace(long, brief)
        words.append(f"{number} {kind}")
    # One kind per line if they do not fit on one line, so that no name is broken.
    return (" " if len(" ".join(words)) <= _NARROW else "\n").join(words)


def _spec(spec: Any) -> str:
    """Return a spec's class and the fields that differ from their defaults, as text."""
    fields = msgspec.structs.fields(spec)
    values = [(field.name, getattr(spec, field.name), field.default) for field in fields]
    said = [f"{name} {value}" for name, value, default in values if value != default]
    return " ".join((type(spec).__name__, ", ".join(said)))


def layouts(as_json: Json = False) -> None:
    """List the memory layouts, and the attention backends that accept each."""
    facts = layout_facts()
    words = ("block outermost", "layer compact", "page contiguous", "heads outside pages")
    # Headers of two lines keep the table narrow.
    heads = ("layout", "alias", *(word.replace(" ", "\n", 1) for word in words))
    made = table(*heads, words=range(6))
    for fact in facts:
        marks = ("yes" if fact[word.replace(" ", "_")] else "-" for word in words)
        made.add_row(Text(fact["order"], style="bold"), fact["alias"] or "", *marks)
    takes = table("backend", "accepted layouts", words=(0, 1), wraps=(1,))
    for backend in BACKENDS.values():
        if backend.layouts:
            takes.add_row(backend.name, ", ".join(backend.layouts))
    takes.add_row("all others", "all six")
    legend = (
        "Axes, outermost first: L page (one per layer), B block, H head, "
        "N state (a token in plain attention), C content (bytes)."
    )
    parts = (indented(made), indented(takes), Text(legend, style="dim"))
    answer(as_json, {"layouts": facts}, *parts)


def hybrids() -> None:
    """Print a Markdown table with the plans of vLLM and of policy atlas for all hybrid models."""
    typer.echo(hybrids_page(), nl=False)
