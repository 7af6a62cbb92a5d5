"""Options of the command line that control how a trace is replayed.

Each field of `ReplayOptions` declares one option. The decorator `takes_replay_options` adds these
options to the signature of a command, and passes one `ReplayOptions` to the command as `replay`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from kvatlas.cli.options import OF_GPUS, PlanOptions, completer
from kvatlas.planning import Plan

EVICTIONS = ("fifo", "lru", "lfu", "s3-fifo", "saved-compute", "optimal")
CHECKPOINTS = (
    "every-block", "vllm-default", "prompt-end", "branch-points", "every-2048", "every-8192",
)  # fmt: skip
_REPLAY, _TIERS = "Replay", "Tiers"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Options of a simulation, in addition to the plan and the trace."""

    eviction: Annotated[
        str,
        typer.Option(
            help="Eviction policy: lru, lfu, s3-fifo, ...",
            autocompletion=completer(*EVICTIONS),
            rich_help_panel=_REPLAY,
        ),
    ] = "lru"
    checkpoints: Annotated[
        str | None,
        typer.Option(
            help="Where to keep states and windows for reuse: every-block, vllm-default, "
            "prompt-end, branch-points, every-4096. Append -within-25 to limit them to a "
            "quarter of the memory. [dim]By default branch-points.[/]",
            autocompletion=completer(*CHECKPOINTS),
            rich_help_panel=_REPLAY,
        ),
    ] = None
    arrivals: Annotated[
        bool,
        typer.Option(
            "--arrivals",
            help="Replay the arrival times of the trace: concurrent requests hold their blocks.",
            rich_help_panel=_REPLAY,
        ),
    ] = False
    tflops: Annotated[
        float,
        typer.Option(
            help="Sustained TFLOP/s of each rank during prefill.", rich_help_panel=_REPLAY
        ),
    ] = 400.0
    active_params: Annotated[
        str | None,
        typer.Option(
            help="Active parameters per token: 5.1G. [dim]By default the model's.[/]",
            rich_help_panel=_REPLAY,
        ),
    ] = None
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="Host memory for blocks that GPUs evict, for all ranks together: 512GiB.",
            rich_help_panel=_TIERS,
        ),
    ] = None
    disk: Annotated[
        str | None,
        typer.Option(
            help="Disk space for blocks that host memory or, without it, GPUs evict: 4TiB.",
            rich_help_panel=_TIERS,
        ),
    ] = None

    def tiers(self, options: PlanOptions) -> dict[str, Plan]:
        """Return a plan for each configured tier, by name: `host` (host memory) or `disk`.

        A tier stores the caches of all ranks, so its plan has a single rank.
        """
        whole: dict[str, Any] = OF_GPUS | {"tp": 1, "pp": 1, "dp": 1, "dcp": 1}
        sizes = {"host": self.host_memory, "disk": self.disk}
        return {
            name: options.plan(memory=memory, **whole)
            for name, memory in sizes.items()
            if memory is not None
        }


def takes_replay_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the replay options to a command's signature; the command receives them as `replay`."""
    own = inspect.signature(command, eval_str=True)
    named = inspect.signature(ReplayOptions, eval_str=True).parameters
    others = [parameter for name, parameter in own.parameters.items() if name != "replay"]

    def spread(options: Any, **given: Any) -> None:
        replay = ReplayOptions(**{name: given.pop(name) for name in named})
        command(options, replay=replay, **given)

    spread.__name__, spread.__doc__ = command.__name__, command.__doc__
    # typer reads this signature. Python requires parameters without defaults to come first.
    first, *rest = others
    rest = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in rest]
    vars(spread)["__signature__"] = own.replace(parameters=[first, *rest, *named.values()])
    return spread
