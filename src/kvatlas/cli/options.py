"""The options of a plan on the command line, declared once for all commands.

The fields of `PlanOptions` carry their options, and are named like the parameters of
`kvatlas.plan`. `@takes_plan_options` spreads them over a command's signature, where typer
looks for them, and hands the command one `PlanOptions`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_type_hints

import typer

from kvatlas.geometry import ENGINE_LAYOUTS
from kvatlas.models import Model, catalogue
from kvatlas.planning import BACKENDS, Plan, Policy, plan
from kvatlas.specs import ATTENTION_CACHES, LATENT_CACHES

POLICIES: tuple[str, ...] = get_args(Policy)
CACHES = tuple(dict.fromkeys((*ATTENTION_CACHES, *LATENT_CACHES)))

_MACHINE = "Machine"
_CACHE = "Cache"


def completer(*words: str) -> Callable[[str], list[str]]:
    """Shell completion over fixed words."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def complete_model(incomplete: str) -> list[str]:
    """Catalogue names; the shell completes paths by itself."""
    return completer(*catalogue())(incomplete)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """A model and everything that decides its plan."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A catalogue name, a config.json, or a folder with one.",
            autocompletion=complete_model,
            show_default=False,
        ),
    ]
    memory: Annotated[
        str,
        typer.Option(
            help="Cache memory of each rank: 60GiB, 80GB or bytes.", rich_help_panel=_MACHINE
        ),
    ] = "80GiB"
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.", rich_help_panel=_MACHINE)] = 1
    pp: Annotated[int, typer.Option(help="Pipeline stages.", rich_help_panel=_MACHINE)] = 1
    dcp: Annotated[
        int, typer.Option(help="Decode-context-parallel ranks.", rich_help_panel=_MACHINE)
    ] = 1
    max_len: Annotated[
        str | None,
        typer.Option(
            help="Tokens of the longest request: 32768, 32K for the same, or 32k for 32000. "
            "[dim]By default 32768, or what the model allows.[/]",
            rich_help_panel=_MACHINE,
        ),
    ] = None
    requests: Annotated[
        int | None,
        typer.Option(
            help="Requests to keep states for, where a plan keeps them apart.",
            rich_help_panel=_MACHINE,
        ),
    ] = None
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            help="Cache dtype: fp8, nvfp4, ... [dim]By default the checkpoint's.[/]",
            autocompletion=completer(*CACHES, "bf16", "fp16", "fp32"),
            rich_help_panel=_CACHE,
        ),
    ] = None
    layout: Annotated[
        str | None,
        typer.Option(
            help="Order of the axes: BLHNC, NHD, ... See `kvatlas layouts`.",
            autocompletion=completer(*(layout.order for layout in ENGINE_LAYOUTS), "NHD", "HND"),
            rich_help_panel=_CACHE,
        ),
    ] = None
    backend: Annotated[
        str | None,
        typer.Option(
            help="Attention backend. [dim]By default vLLM's choice on Hopper.[/]",
            autocompletion=completer(*BACKENDS),
            rich_help_panel=_CACHE,
        ),
    ] = None
    policy: Annotated[
        str,
        typer.Option(
            help="atlas, vllm (its answer to the byte) or uniform (one group).",
            autocompletion=completer(*POLICIES),
            rich_help_panel=_CACHE,
        ),
    ] = "atlas"
    pack: Annotated[
        str,
        typer.Option(
            help="Attention layers in a page of a hybrid: auto or a number.",
            autocompletion=completer("auto", "1", "2", "4", "8"),
            rich_help_panel=_CACHE,
        ),
    ] = "auto"
    states: Annotated[
        str,
        typer.Option(
            help="Recurrent states: auto, shared (one pool, may pad more) or apart.",
            autocompletion=completer("auto", "shared", "apart"),
            rich_help_panel=_CACHE,
        ),
    ] = "auto"
    block_size: Annotated[
        int | None,
        typer.Option(help="Tokens in a block, before hybrids grow it.", rich_help_panel=_CACHE),
    ] = None
    prefix_caching: Annotated[
        bool,
        typer.Option(
            " /--no-prefix-caching",
            help="Keep no states at block ends for reuse.",
            rich_help_panel=_CACHE,
            show_default=False,
        ),
    ] = True

    def plan(self, **changes: Any) -> Plan:
        """The plan, with some options changed."""
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        options |= changes
        options["pack"] = _pack(options["pack"])
        return plan(options.pop("model"), **options)

    def load(self) -> Model:
        """The model, read once where several plans are made of it."""
        return Model.load(self.model)


def takes_plan_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command that takes `PlanOptions` first, and on the command line its options."""
    own = inspect.signature(command, eval_str=True)
    fields = dataclasses.fields(PlanOptions)
    hints = get_type_hints(PlanOptions, include_extras=True)
    options = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty
            if field.default is dataclasses.MISSING
            else field.default,
            annotation=hints[field.name],
        )
        for field in fields
    ]
    rest = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in list(own.parameters.values())[1:]
    ]

    def spread(**given: Any) -> None:
        command(PlanOptions(**{field.name: given.pop(field.name) for field in fields}), **given)

    parameters = [*options, *rest]
    spread.__name__, spread.__doc__ = command.__name__, command.__doc__
    spread.__annotations__ = {one.name: one.annotation for one in parameters}
    # What typer reads: neither name above is known to type checkers as settable.
    vars(spread)["__signature__"] = own.replace(parameters=parameters)
    return spread


def _pack(text: str | int) -> int | str:
    if text == "auto" or isinstance(text, int):
        return text
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is neither auto nor a number.", param_hint="'--pack'"
        ) from None
