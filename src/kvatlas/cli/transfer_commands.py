"""The commands `check`, `doctor`, `move` and `bench`, which transfer caches or check transfers."""

from __future__ import annotations

from typing import Annotated

import typer

from kvatlas.cli.app import Json, answer
from kvatlas.cli.options import MODEL, PlanOptions
from kvatlas.planning.request import length


def check(
    first: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|PLAN", help="A model, or the source's plan file.", show_default=False
        ),
    ],
    second: Annotated[
        str | None,
        typer.Argument(metavar="PLAN", help="The destination's plan file.", show_default=False),
    ] = None,
    source_options: Annotated[
        str | None, typer.Option("--from", help="Plan options of the source: tp=2,layout=LBHNC")
    ] = None,
    target_options: Annotated[
        str | None, typer.Option("--to", help="Plan options of the destination: tp=4,block-size=32")
    ] = None,
    many: Annotated[
        str | None,
        typer.Option(
            "--tokens",
            help="Tokens of the request to copy: 8192, 8K. [dim]By default at most 4096.[/]",
        ),
    ] = None,
    convert: Annotated[
        str | None, typer.Option(help="Convert the cache dtype on the way: 'fp8->bf16'")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check whether caches can be copied from one plan to another, and at what cost.

    Takes a model with --from and --to, or two plans that `kvatlas plan --save` wrote.
    Exits with 1 if caches cannot be copied.
    """
    from kvatlas.cli.check import check_parts, two_plans
    from kvatlas.routing import check as check_route

    source, destination = two_plans(first, second, source_options, target_options)
    tokens = length(many) if many else None
    found = check_route(source, destination, tokens=tokens, convert=convert)
    answer(as_json, found.as_dict(), *check_parts(source, destination, found))
    if not found.ok:
        raise typer.Exit(1)


def doctor(
    first: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|ENGINE",
            help="A model, or the prefill engine's file.",
            show_default=False,
        ),
    ],
    second: Annotated[
        str | None,
        typer.Argument(metavar="ENGINE", help="The decode engine's file.", show_default=False),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", help="Arguments of the prefill engine: tp=2,kv-cache-dtype=fp8"),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--to", help="Arguments of the decode engine: tp=1,block-size=128"),
    ] = None,
    many: Annotated[
        str, typer.Option("--tokens", help="Tokens of the request to transfer: 1000, 8K.")
    ] = "1000",
    peer: Annotated[
        str | None,
        typer.Option(
            help="Also connect to a rank that is running, at HOST:PORT.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check whether two vLLM engines can exchange caches, without starting them.

    Pass a model with --from and --to, or two files. A file contains the engine's command line, its
    arguments as JSON, or a saved plan. Exits with 1 if the engines are incompatible.
    """
    from kvatlas.cli.doctor import doctor_parts, two_engines
    from kvatlas.cli.move import quiet
    from kvatlas.engines.vllm import diagnose

    engines = two_engines(first, second, source, target)
    with quiet("Comparing two engines ..."):
        found = diagnose(*engines, tokens=length(many), peer=peer)
    answer(as_json, found.as_dict(), *doctor_parts(found))
    if not found.ok:
        raise typer.Exit(1)


def move(
    model: Annotated[str, MODEL],
    source_options: Annotated[
        str, typer.Option("--from", help="Plan options of the source: tp=2")
    ] = "",
    target_options: Annotated[
        str, typer.Option("--to", help="Plan options of the destination: layout=BHLNC")
    ] = "",
    many: Annotated[str, typer.Option("--tokens", help="Tokens of the request: 512, 8K.")] = "512",
    transport: Annotated[
        str | None,
        typer.Option(
            help="nixl, mooncake, tcp or shm. [dim]By default the first that runs on this host.[/]"
        ),
    ] = None,
    how: Annotated[
        str,
        typer.Option(
            help="How to send: direct (one descriptor per run), staged (gather at the source), "
            "coalesced (scatter at the destination) or auto (by measured cost)."
        ),
    ] = "auto",
    convert: Annotated[
        str | None, typer.Option(help="Convert the cache dtype on the way: 'fp8->bf16'")
    ] = None,
    as_json: Json = False,
) -> None:
    """Move a request of random bytes between two processes, and verify every byte.

    The processes use different plans of the model. Exits with 1 if a byte is wrong.
    """
    from kvatlas.cli.check import changes
    from kvatlas.cli.move import choose_transport, move_parts, move_request, quiet, small_plan

    if how not in ("auto", "direct", "staged", "coalesced"):
        problem = "choose auto, direct, staged or coalesced."
        raise typer.BadParameter(problem, param_hint="'--how'")
    tokens = length(many)
    with quiet("Moving a request between two processes ..."):
        chosen = choose_transport(transport)
        ends = (("'--from'", source_options), ("'--to'", target_options))
        source, destination = (
            small_plan(PlanOptions(model=model, **changes(text, where)), tokens)
            for where, text in ends
        )
        moved = move_request(source, destination, tokens, chosen, how, convert)  # type: ignore[arg-type]
        ranks = list(moved)
    answer(
        as_json,
        {"transport": chosen, "ranks": [one.as_dict() for one in ranks]},
        *move_parts(source, destination, chosen, ranks),
    )
    if any(rank.wrong for rank in ranks):
        raise typer.Exit(1)


def bench(
    what: Annotated[str, typer.Argument(metavar="wire", help="The only benchmark.")],
    as_json: Json = False,
) -> None:
    """Measure the throughput of each transport between two processes on this host."""
    from kvatlas.cli.bench import bench_parts, transport_rates
    from kvatlas.cli.move import quiet

    if what != "wire":
        raise typer.BadParameter(f"there is no benchmark {what!r}; pass wire.", param_hint="WHAT")
    with quiet("Measuring transports between two processes ..."):
        rates = list(transport_rates())
    answer(as_json, {"rates": rates}, *bench_parts(rates))
