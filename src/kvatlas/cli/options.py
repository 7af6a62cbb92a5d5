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
from typing import Annotated, Any, get_args

import typer

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import ENGINE_LAYOUTS
from kvatlas.geometry.integers import positive
from kvatlas.models import GPUS, Model, catalogue, find_gpus
from kvatlas.planning import BACKENDS, Fit, Fitting, Plan, Policy, plan
from kvatlas.planning.fitting import given_topology
from kvatlas.specs import ATTENTION_CACHES, LATENT_CACHES

POLICIES: tuple[str, ...] = get_args(Policy)
CACHES = tuple(dict.fromkeys((*ATTENTION_CACHES, *LATENT_CACHES)))

DEFAULT_MEMORY = "80GiB"
_TOPOLOGY = ("tp", "pp", "dp", "dcp", "ep")
_OF_GPUS = {"gpu": None, "utilization": None, "overhead": None, "ep": 1}
"""Options that mean nothing without a GPU, and their defaults."""
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


def _option(help_text: str, panel: str, *words: str, flag: str | None = None) -> Any:
    """An option in one of the panels of --help; the shell completes `words`."""
    return typer.Option(
        *([flag] if flag else []),
        help=help_text,
        rich_help_panel=panel,
        autocompletion=completer(*words) if words else None,
        show_default=flag is None,
    )


MODEL = typer.Argument(
    metavar="MODEL",
    help="A catalogue name, a config.json, or a folder with one.",
    autocompletion=complete_model,
    show_default=False,
)

MODELS = typer.Argument(
    metavar="MODEL...",
    help="Catalogue names, config.json files, or folders with one.",
    autocompletion=complete_model,
    show_default=False,
)

_LENGTHS = (
    "Tokens of the longest request: 32768, 32K for the same, or 32k for 32000. "
    "[dim]By default 32768, or what the model allows.[/]"
)
_MEMORY = "Cache memory of each rank: 60GiB, 80GB or bytes. [dim]By default 80GiB.[/]"
_GPU = "H100, 8xH100, ...: the memory that weights leave there, in place of --memory."
_UTILIZATION = "Part of the GPU's memory that an engine takes. [dim]By default 0.9.[/]"
_OVERHEAD = "Memory of a GPU that is neither weights nor cache. [dim]By default 3GiB.[/]"
_TP = "Tensor-parallel ranks. [dim]By default 1, or all GPUs that pp and dp leave.[/]"
_IN_FLIGHT = (
    "Tokens of a request that are scheduled and not yet settled while it prefills. "
    "[dim]By default 8192 for each batch under way: 16384 without pipelines.[/]"
)
_REQUESTS = "Requests to keep recurrent states for, in a pool of their own."
_STATES = "Recurrent states: auto, shared (one pool with attention) or apart."
_ORDERS = (*(layout.order for layout in ENGINE_LAYOUTS), "NHD", "HND")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """A model and everything that decides its plan."""

    model: Annotated[str, MODEL]
    gpu: Annotated[str | None, _option(_GPU, _MACHINE, *GPUS)] = None
    memory: Annotated[str | None, _option(_MEMORY, _MACHINE)] = None
    utilization: Annotated[float | None, _option(_UTILIZATION, _MACHINE)] = None
    overhead: Annotated[str | None, _option(_OVERHEAD, _MACHINE)] = None
    tp: Annotated[int | None, _option(_TP, _MACHINE)] = None
    pp: Annotated[int, _option("Pipeline stages.", _MACHINE)] = 1
    dp: Annotated[int, _option("Replicas, each with a cache of its own.", _MACHINE)] = 1
    dcp: Annotated[int, _option("Decode-context-parallel ranks.", _MACHINE)] = 1
    ep: Annotated[int, _option("Ranks that whole experts are dealt out to.", _MACHINE)] = 1
    max_len: Annotated[str | None, _option(_LENGTHS, _MACHINE)] = None
    in_flight: Annotated[int | None, _option(_IN_FLIGHT, _MACHINE)] = None
    requests: Annotated[int | None, _option(_REQUESTS, _MACHINE)] = None
    kv_dtype: Annotated[
        str | None,
        _option(
            "Cache dtype: fp8, nvfp4, ... [dim]By default the checkpoint's.[/]",
            _CACHE, *CACHES, "bf16", "fp16", "fp32",
        ),
    ] = None  # fmt: skip
    layout: Annotated[
        str | None,
        _option("Order of the axes: BLHNC, NHD, ... See `kvatlas layouts`.", _CACHE, *_ORDERS),
    ] = None
    backend: Annotated[
        str | None,
        _option(
            "Attention backend. [dim]By default vLLM's choice on Hopper.[/]", _CACHE, *BACKENDS
        ),
    ] = None
    policy: Annotated[
        str,
        _option("atlas, vllm (its answer to the byte) or uniform (one group).", _CACHE, *POLICIES),
    ] = "atlas"
    pack: Annotated[
        str,
        _option(
            "Attention layers in a page of a hybrid: auto or a number.",
            _CACHE, "auto", "1", "2", "4", "8",
        ),
    ] = "auto"  # fmt: skip
    states: Annotated[str, _option(_STATES, _CACHE, "auto", "shared", "apart")] = "auto"
    block_size: Annotated[
        int | None, _option("Tokens in a block, before hybrids grow it.", _CACHE)
    ] = None
    prefix_caching: Annotated[
        bool,
        _option("Keep no states at block ends for reuse.", _CACHE, flag=" /--no-prefix-caching"),
    ] = True

    def plan(self, **changes: Any) -> Plan:
        """The plan, with some options changed."""
        found = self.fit(**changes)
        if isinstance(found, Plan):
            return found
        if found.plan is None:
            raise found.refusal or AssertionError("neither a plan nor a refusal")
        return found.plan

    def fit(self, **changes: Any) -> Plan | Fit:
        """The plan in the memory that was given, or the model on the GPU that was."""
        options = self._options(changes)
        if options["gpu"] is not None:
            sizes = {name: options[name] for name in _TOPOLOGY}
            count, _ = find_gpus(options["gpu"])
            return self.fitting(**changes).on(given_topology(count, **sizes))
        for name, default in _OF_GPUS.items():
            if options.pop(name) != default:
                raise contradictory(f"--{name} without --gpu", "Give --gpu, or leave it out")
        positive(options.pop("dp"), "dp")
        options["memory"] = DEFAULT_MEMORY if options["memory"] is None else options["memory"]
        options["tp"] = 1 if options["tp"] is None else options["tp"]
        return plan(options.pop("model"), **options)

    def fitting(self, **changes: Any) -> Fitting:
        """The model with its weights, to be tried on the GPU that was given."""
        options = self._options(changes) | {"model": self.model}
        if options.pop("memory") is not None:
            raise contradictory("--memory and --gpu", "Give one of them")
        _, gpu = find_gpus(options.pop("gpu"))
        skipped = [name for name in ("utilization", "overhead") if options[name] is None]
        for name in (*_TOPOLOGY, *skipped):
            del options[name]
        return Fitting(options.pop("model"), gpu, **options)

    def _options(self, changes: dict[str, Any]) -> dict[str, Any]:
        options = dataclasses.asdict(self) | changes
        pack = options["pack"]
        if pack != "auto":
            options["pack"] = number(pack, f"{pack!r} is neither auto nor a number.", "'--pack'")
        return options

    def load(self) -> Model:
        """The model, read once where several plans are made of it."""
        return Model.load(self.model)


def contradictory(got: str, hint: str) -> AtlasError:
    """The refusal of options that cannot be had together."""
    return AtlasError(Code.CONTRADICTORY, got=got, hint=hint)


def takes_plan_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command that takes `PlanOptions` first, and on the command line its options."""
    return _spread(command, {}, lambda given: PlanOptions(**given))


def takes_models(command: Callable[..., None]) -> Callable[..., None]:
    """A command that takes a list of `PlanOptions` first: of several models, alike otherwise."""
    several = inspect.Parameter(
        "models", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Annotated[list[str], MODELS]
    )

    def each(given: dict[str, Any]) -> list[PlanOptions]:
        return [PlanOptions(model=model, **given) for model in given.pop("models")]

    return _spread(command, {"model": several}, each)


def _spread(
    command: Callable[..., None],
    instead: dict[str, inspect.Parameter],
    made: Callable[[dict[str, Any]], Any],
) -> Callable[..., None]:
    """A command whose first parameter is `made` of options that the command line takes."""
    own = inspect.signature(command, eval_str=True)
    named = inspect.signature(PlanOptions, eval_str=True).parameters
    options = [instead.get(name, parameter) for name, parameter in named.items()]
    rest = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in list(own.parameters.values())[1:]
    ]
    parameters = [*options, *rest]

    def spread(**given: Any) -> None:
        command(made({one.name: given.pop(one.name) for one in options}), **given)

    spread.__name__, spread.__doc__ = command.__name__, command.__doc__
    spread.__annotations__ = {one.name: one.annotation for one in parameters}
    # What typer reads: neither name above is known to type checkers as settable.
    vars(spread)["__signature__"] = own.replace(parameters=parameters)
    return spread


def number(text: str, problem: str, where: str) -> int:
    """The number that an option's value is; where it is none, say so."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(problem, param_hint=where) from None
