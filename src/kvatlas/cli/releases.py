"""`kvatlas releases`: compare the plans of two vLLM releases for all models of the catalogue."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text

from kvatlas.cli.app import Json, answer
from kvatlas.cli.hybrids_page import patiently
from kvatlas.cli.options import DEFAULT_MEMORY, completer
from kvatlas.cli.tables import indented, labelled_notes, requests, table
from kvatlas.errors import AtlasError
from kvatlas.models import Model, catalogue
from kvatlas.planning import plan
from kvatlas.planning.engine_rules import CHIPS, RELEASES, checked_chip, split_policy

LENGTHS = (4096, 32768)

_LEGEND = (
    "4k, 32k: decoding requests of 4,096 and 32,768 tokens that fit. "
    "ratio: at 4,096 tokens, the newer release relative to the older."
)
_RELEASE = typer.Argument(help="A release of vLLM: 0.32.", autocompletion=completer(*RELEASES))


def releases(
    older: Annotated[str, _RELEASE],
    newer: Annotated[str, _RELEASE],
    chip: Annotated[
        str, typer.Option(help="CUDA chip: sm80, sm90, ...", autocompletion=completer(*CHIPS))
    ] = "sm90",
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 8,
    memory: Annotated[str, typer.Option(help="Cache memory per rank: 60GiB.")] = DEFAULT_MEMORY,
    as_json: Json = False,
) -> None:
    """Compare the plans of two releases of vLLM for all models of the catalogue."""
    for release in (older, newer):
        split_policy(f"vllm@{release}")
    checked_chip(chip)
    names = list(catalogue())
    rows = [
        row
        for name in patiently(names, "Planning models")
        if (row := _row(name, older, newer, chip=chip, tp=tp, memory=memory))
    ]
    left_out = [name for name in names if name not in {row["model"] for row in rows}]
    changed = [row for row in rows if row["changed"]]
    title = Text(f"vLLM {older} -> {newer}", style="bold")
    title.append(f"  {chip}, tp {tp}, {memory} per rank", style="not bold dim")
    count = f"{len(changed)} of {len(rows)} plans change."
    if left_out:
        count += f" {len(left_out)} models have no plan with tp {tp} in {memory}."
    made = table("model", "block", "", "4k", "", "32k", "", "ratio")
    for row in changed:
        cells = [
            cell
            for old, new in zip(row["older"], row["newer"], strict=True)
            for cell in (_figure(old), f"-> {_figure(new)}")
        ]
        made.add_row(Text(row["model"], style="bold"), *cells, f"{row['ratio']:.2f}")
    told = [indented(made)] if changed else []
    facts = {
        "older": older, "newer": newer, "chip": chip, "tp": tp, "rows": rows, "left_out": left_out,
    }  # fmt: skip
    noted = labelled_notes((row["model"], note) for row in rows for note in row["warnings"])
    answer(as_json, facts, title, Text(count), *told, *noted, Text(_LEGEND, style="dim"))


def _row(name: str, older: str, newer: str, **ask: Any) -> dict[str, Any] | None:
    """Return the figures of a model's plans; None if the model has no plan with this tp."""
    model = Model.load(name)
    try:
        plans = [
            plan(model, policy=f"vllm@{release}", max_len=LENGTHS[-1], **ask)
            for release in (older, newer)
        ]
    except AtlasError:
        return None
    old, new = (
        [made.block_size, *(round(made.requests(n, in_flight=1), 4) for n in LENGTHS)]
        for made in plans
    )
    same = plans[0].regions == plans[1].regions and old == new
    ratio = round(new[1] / old[1], 4)
    told = dict.fromkeys(note for made in plans for note in made.warnings)
    warnings = [note for note in told if not note.startswith("max_len ")]
    return {
        "model": name, "older": old, "newer": new, "ratio": ratio, "changed": not same,
        "warnings": warnings,
    }  # fmt: skip


def _figure(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else requests(value)
