"""The commands `plan`, `fit`, `explain` and `map`, and the registration of all others.

Each command calls another package and prints the result.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from kvatlas.cli.app import Json, answer, app, command
from kvatlas.cli.budget import budget
from kvatlas.cli.catalogue_commands import hybrids, layouts, models
from kvatlas.cli.compare import AXES, axes_of, compared_plans, compared_title
from kvatlas.cli.explain_compare import plan_differences
from kvatlas.cli.failures import REFUSED, no_traceback, plain, report
from kvatlas.cli.fit import fit_models, fit_parts, plan_on
from kvatlas.cli.options import (
    MODELS,
    PlanOptions,
    TokenizerOption,
    completer,
    takes_plan_options,
)
from kvatlas.cli.record_events import events
from kvatlas.cli.releases import releases
from kvatlas.cli.simulate import simulate
from kvatlas.cli.tables import (
    COMPARISON_LEGEND,
    HYBRID_LEGEND,
    comparison,
    headline,
    notes,
    sentences,
    show,
    written,
)
from kvatlas.cli.tier_commands import tier_app
from kvatlas.cli.trace_summary import trace
from kvatlas.cli.traffic import plan_for_trace
from kvatlas.cli.transfer_commands import bench, check, doctor, move
from kvatlas.planning.request import length

__all__ = ["app", "run"]


def run() -> None:
    """Run the command line with the arguments of this process."""
    for stream in (sys.stdout, sys.stderr):
        # If the terminal cannot encode a character, escape it instead of failing.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    with no_traceback():
        app(prog_name="kvatlas")


@command(
    "plan Qwen3.5-397B-A17B --tp 2 --memory 60GiB",
    "plan ./config.json --kv-dtype fp8 --max-len 128Ki --json",
    "plan gpt-oss-20b --gpu 2xH100 --max-len 128K",
    "plan gpt-oss-20b --compare policy,tp",
    "plan DeepSeek-V3 --backend FLASHMLA --compare kv-dtype=auto,fp8",
    "plan Qwen3.5-397B-A17B --memory 200GiB --trace conversations.jsonl",
)
@takes_plan_options
def plan(
    options: PlanOptions,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            help="Compare plans with different values of an option, such as policy,tp (one table "
            "for each) or tp=1,3,8 (only these values). May be repeated.",
            autocompletion=completer(*AXES),
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Choose block size, pack and checkpoints by replaying this trace. "
            "See `kvatlas simulate`.",
            show_default=False,
        ),
    ] = None,
    trace_block: Annotated[
        int | None,
        typer.Option(help="Tokens that each id of the trace represents. See `kvatlas simulate`."),
    ] = None,
    tokenizer: TokenizerOption = None,
    save: Annotated[Path | None, typer.Option(help="Write the plan to this JSON file.")] = None,
    as_json: Json = False,
) -> None:
    """Plan a model's cache: blocks, tokens and requests that fit, and groups of layers."""
    if trace_block is not None and trace is None:
        raise typer.BadParameter("it requires --trace.", param_hint="'--trace-block'")
    if compare:
        if save:
            problem = "it writes one plan, so it cannot be combined with --compare."
            raise typer.BadParameter(problem, param_hint="'--save'")
        if trace:
            problem = "it chooses one plan, so it cannot be combined with --compare."
            raise typer.BadParameter(problem, param_hint="'--trace'")
        _compare(options, compare, as_json=as_json)
        return
    chosen = plan_for_trace(options, trace, trace_block, tokenizer) if trace else None
    planned = plan_on(replace(options, **chosen.options) if chosen else options)
    if save:
        _save(save, planned.plan.to_json())
    facts = planned.facts()
    if chosen:
        facts |= {
            "tried": chosen.facts(),
            "unseen": chosen.trace.unseen,
            "notes": chosen.trace.notes(),
        }
    wrote = [written(save)] if save else []
    answer(as_json, facts, *planned.parts(), *(chosen.parts() if chosen else ()), *wrote)


def _compare(options: PlanOptions, texts: list[str], *, as_json: bool) -> None:
    rows = {axis: compared_plans(options, axis, v) for axis, v in axes_of(texts).items()}
    title = compared_title(options, options.load(), *rows)
    shown = (comparison(axis, plans) for axis, plans in rows.items())
    every = [row for plans in rows.values() for row in plans]
    noted = dict.fromkeys(note for row in every for note in row["warnings"] or ())
    hybrid = HYBRID_LEGEND if any(row["way"] for row in every) else ""
    legend = Text(COMPARISON_LEGEND + hybrid, style="dim")
    answer(as_json, {"rows": every}, title, *shown, *notes(noted), legend)


@command(
    "fit Llama-3.1-70B gpt-oss-120b DeepSeek-V3.2 --gpu 8xH100 --max-len 128K",
    "fit ./configs/*.json --gpu H200 --kv-dtype fp8 --json",
)
def fit(
    models: Annotated[list[str], MODELS],
    *,
    gpu: Annotated[str, typer.Option(help="Number and type of the GPUs: 8xH100, H200.")],
    max_len: Annotated[
        str | None, typer.Option(help="Tokens of the longest request: 128K.")
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(help="Cache dtype: fp8, nvfp4, ..., or several, to find the best: auto,fp8."),
    ] = None,
    tp: Annotated[
        int | None, typer.Option(help="Only this number of tensor-parallel ranks.")
    ] = None,
    pp: Annotated[int | None, typer.Option(help="Only this number of pipeline stages.")] = None,
    dp: Annotated[int | None, typer.Option(help="Only this number of replicas.")] = None,
    dcp: Annotated[
        int | None, typer.Option(help="Only this number of decode-context-parallel ranks.")
    ] = None,
    ep: Annotated[
        int | None, typer.Option(help="Only this number of expert-parallel ranks.")
    ] = None,
    in_flight: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a prefilling request that are scheduled but not computed yet."
        ),
    ] = None,
    utilization: Annotated[
        float, typer.Option(help="Share of the GPU memory that the engine may use.")
    ] = 0.9,
    overhead: Annotated[
        str,
        typer.Option(
            help="GPU memory that is neither weights nor cache; auto: as in `kvatlas budget`."
        ),
    ] = "3GiB",
    weights_dtype: Annotated[
        str | None, typer.Option(help="Format of the weights: fp8, nvfp4, ...")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the topology on which each model serves the most users, and the second best.

    If a model cannot be loaded, an error is printed on stderr, the other models are fitted, and
    the exit code is 2.
    """
    options = {"kv_dtype": kv_dtype, "max_len": max_len, "in_flight": in_flight}
    options |= {"weights_dtype": weights_dtype}
    options |= {"tp": tp, "pp": pp, "dp": dp, "dcp": dcp, "ep": ep}
    found, failed = fit_models(models, gpu, utilization=utilization, overhead=overhead, **options)
    if found or as_json:
        fits = [one.as_dict() for one in found]
        answer(as_json, {"fits": fits}, *fit_parts(found, gpu, max_len))
    for refusal in failed:
        report(refusal)
    if failed:
        raise typer.Exit(REFUSED)


command(
    "budget Llama-3.1-70B --gpu 4xH100 --max-len 32K",
    "budget gpt-oss-120b --gpu H200 --max-num-seqs 256 --json",
)(budget)


def _save(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content + b"\n")
    except OSError as problem:
        raise typer.BadParameter(
            f"cannot write {plain(path)}: {problem.strerror}.", param_hint="'--save'"
        ) from None


@command(
    "explain Qwen3.5-397B-A17B --tp 2 --policy vllm",
    "explain Nemotron-H-8B --memory 20GiB",
    "explain Qwen3.5-397B-A17B --tp 2 --chip sm90 --compare policy=vllm@0.32,vllm@0.33",
)
@takes_plan_options
def explain(
    options: PlanOptions,
    compare: Annotated[
        str | None,
        typer.Option(
            help="Compare the plans with these values of one option, such as "
            "policy=vllm@0.32,vllm@0.33, and print the sentences in which they differ.",
            autocompletion=completer(*AXES),
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Explain a plan: the reasons for its block size and its padding."""
    if compare:
        differences = plan_differences(options, compare)
        answer(as_json, differences.facts, *differences.parts())
        return
    planned = plan_on(options)
    lines = planned.plan.explain().splitlines()
    facts = {**planned.facts(), "explain": [line.strip() for line in lines]}
    headed = {**facts, "answer": planned.answer()}
    # The headline already contains the content of the first two sentences.
    about = notes(planned.fit.machine_warnings) if planned.fit else []
    answer(as_json, facts, headline(headed), *planned.machine(), sentences(lines[2:]), *about)


command(
    "check Qwen3-8B --from tp=2,layout=LBHNC --to tp=4,layout=BHLNC",
    "check prefill.json decode.json --tokens 8192 --json",
    "check Qwen3-8B --from kv-dtype=fp8 --to kv-dtype=bf16 --convert 'fp8->bf16'",
)(check)
command(
    "doctor Qwen3-8B --from tp=2,block-size=64 --to tp=1,block-size=128",
    "doctor prefill.sh decode.sh",
    "doctor prefill.json decode.json --json",
)(doctor)


@command(
    "map Qwen3-8B --layout BHLNC -o map.html --open",
    "map Qwen3.5-397B-A17B --gpu 8xH200 -o map.html",
    "map Qwen3-8B --from tp=2,layout=LBNHC --to tp=4,layout=BHLNC -o route.html",
    "map prefill.json --to decode.json",
    "map gpt-oss-20b --text",
)
@takes_plan_options
def map(  # noqa: A001 - the command's name
    options: PlanOptions,
    source: Annotated[
        str | None, typer.Option("--from", help="Plan options of the source: tp=2,layout=LBHNC")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--to", help="Draw the route to this plan: a file, or options: tp=4,layout=BHLNC"
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="The output file, which is replaced. [dim]By default map.html; --svg and --text "
            "print.[/]",
        ),
    ] = None,
    svg: Annotated[bool, typer.Option("--svg", help="Draw an SVG picture.")] = False,
    text: Annotated[bool, typer.Option("--text", help="Draw a picture of characters.")] = False,
    opened: Annotated[bool, typer.Option("--open", help="Open the file in the browser.")] = False,
    many: Annotated[
        str | None,
        typer.Option(
            "--tokens",
            help="Tokens of the request to route: 8192, 8K. [dim]By default at most 4096.[/]",
        ),
    ] = None,
) -> None:
    """Draw where every byte of a cache is stored or, with --to, the route between two plans.

    Takes a model, or a plan that `kvatlas plan --save` wrote. The page works offline.
    """
    from kvatlas.cli.draw import draw

    if svg and text:
        raise typer.BadParameter("choose either --svg or --text.", param_hint="'--svg'")
    tokens = length(many) if many else None
    drawn = draw(options, source, target, tokens=tokens, knobs=not (svg or text))
    if (svg or text) and output is None and not opened:
        typer.echo(drawn.svg() if svg else drawn.text(), nl=False)
        for warning in drawn.warnings:
            typer.echo(f"Note: {plain(warning)}", err=True)
        return
    form = "svg" if svg else "txt" if text else "html"
    path = output or Path(f"map.{form}")
    replaced = path.exists()
    path = drawn.save(path, form=form)
    show(written(path, replaced=replaced), *notes(drawn.warnings))
    if opened:
        typer.launch(path.absolute().as_uri())


command(
    "move Qwen3-8B --from tp=2,layout=LBNHC --to layout=BHLNC,block-size=32",
    "move gpt-oss-20b --from tp=2 --to pp=2 --transport shm --how direct",
    "move Qwen3-8B --from kv-dtype=fp8 --to kv-dtype=bf16 --convert 'fp8->bf16'",
)(move)
command("bench wire", "bench wire --json")(bench)
command(
    "simulate Qwen3.5-397B-A17B --trace conversation_trace.jsonl --memory 60GiB",
    "simulate gpt-oss-120b --gpu 2xH100 --trace traces/ --compare policy,checkpoints",
    "simulate Llama-3.1-70B --trace my.jsonl --compare memory=40GiB,80GiB --json",
)(simulate)
command(
    "trace conversation_trace.jsonl",
    "trace chats.jsonl.gz --tokenizer ./Qwen3-8B/tokenizer.json",
    "trace traces/ --json",
)(trace)
command(
    "events tcp://127.0.0.1:5557 -o monday.events --seconds 3600",
    "events tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558 -o monday.events",
)(events)
command("models", "models gpt-oss-20b", "models ./config.json --json")(models)
command("layouts", "layouts --json")(layouts)
command("releases 0.32 0.33", "releases 0.32 0.33 --chip sm100 --tp 8 --json")(releases)
command("hybrids > docs/reference/data/hybrids.md")(hybrids)
app.add_typer(tier_app)
