"""How a trace is replayed, as options of the command line.

The fields of `ReplayOptions` carry their options; `@takes_replay_options` spreads them over a
command's signature, and hands the command one `ReplayOptions` as `replay`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from kvatlas.cli.options import PlanOptions, completer
from kvatlas.planning import Plan

EVICTIONS = ("fifo", "lru", "lfu", "s3-fifo", "saved-compute", "optimal")
CHECKPOINTS = (
    "every-block", "vllm-default", "prompt-end", "branch-points", "every-2048", "every-8192",
)  # fmt: skip
_REPLAY, _TIERS = "Replay", "Tiers"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Everything that decides what a plan's pools find, but for the plan and the trace."""

    eviction: Annotated[
        str,
        typer.Option(
            help="What goes first: lru, ...",
            autocompletion=completer(*EVICTIONS),
            rich_help_panel=_REPLAY,
        ),
    ] = "lru"
    checkpoints: Annotated[
        str | None,
        typer.Option(
            help="Where states and windows are kept: every-block, vllm-default, prompt-end, "
            "branch-points, every-4096; within-25 behind it for a quarter of the memory. "
            "[dim]By default branch-points.[/]",
            autocompletion=completer(*CHECKPOINTS),
            rich_help_panel=_REPLAY,
        ),
    ] = None
    arrivals: Annotated[
        bool,
        typer.Option(
            "--arrivals",
            help="Requests come at their times, and hold blocks.",
            rich_help_panel=_REPLAY,
        ),
    ] = False
    tflops: Annotated[
        float,
        typer.Option(
            help="TFLOP/s that a rank sustains while it computes prompts.", rich_help_panel=_REPLAY
        ),
    ] = 400.0
    active_params: Annotated[
        str | None,
        typer.Option(
            help="Parameters that a token meets: 5.1G. [dim]By default the model's.[/]",
            rich_help_panel=_REPLAY,
        ),
    ] = None
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="Host memory that takes what GPUs evict: 512GiB, of all ranks together.",
            rich_help_panel=_TIERS,
        ),
    ] = None
    disk: Annotated[
        str | None,
        typer.Option(
            help="A disk that takes what the tier above it evicts: 4TiB.", rich_help_panel=_TIERS
        ),
    ] = None

    def tiers(self, options: PlanOptions) -> dict[str, Plan]:
        """A plan for each tier below the GPU: the whole model's caches in one place."""
        whole: dict[str, Any] = {"gpu": None, "utilization": None, "overhead": None, "ep": 1}
        whole |= {"tp": 1, "pp": 1, "dp": 1, "dcp": 1}
        sizes = {"host": self.host_memory, "disk": self.disk}
        return {
            name: options.plan(memory=memory, **whole)
            for name, memory in sizes.items()
            if memory is not None
        }


def takes_replay_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command that takes a `ReplayOptions` as `replay`, and on the command line its options."""
    own = inspect.signature(command, eval_str=True)
    named = inspect.signature(ReplayOptions, eval_str=True).parameters
    others = [parameter for name, parameter in own.parameters.items() if name != "replay"]

    def spread(options: Any, **given: Any) -> None:
        replay = ReplayOptions(**{name: given.pop(name) for name in named})
        command(options, replay=replay, **given)

    spread.__name__, spread.__doc__ = command.__name__, command.__doc__
    # What typer reads. Options without a default come first, in a signature as on a screen.
    first, *rest = others
    rest = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in rest]
    vars(spread)["__signature__"] = own.replace(parameters=[first, *rest, *named.values()])
    return spread
