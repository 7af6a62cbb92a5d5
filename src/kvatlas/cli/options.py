"""The options of a plan on the command line, declared once for all commands.

Each field of `PlanOptions` declares one option and has the name of a parameter of
`kvatlas.plan`. The decorator `takes_plan_options` adds these options to the signature of a command,
where typer finds them, and passes one `PlanOptions` to the command.
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
from kvatlas.models.weights.formats import NAMED_FORMATS
from kvatlas.planning import BACKENDS, Fit, Fitting, GivenSizes, Plan, Policy, plan
from kvatlas.planning.engine_rules import CHIPS, RELEASES
from kvatlas.specs import ATTENTION_CACHES, LATENT_CACHES

POLICIES: tuple[str, ...] = get_args(Policy)
VERSIONED = tuple(f"vllm@{release}" for release in RELEASES)
CACHES = tuple(dict.fromkeys((*ATTENTION_CACHES, *LATENT_CACHES)))

DEFAULT_MEMORY = "80GiB"
_TOPOLOGY = ("tp", "pp", "dp", "dcp", "ep")
OF_GPUS: dict[str, Any] = dict.fromkeys(("gpu", "utilization", "overhead", "weights_dtype", "ep"))
"""Options that require --gpu, and their defaults."""
_COUNTS = {
    "tp": "tensor-parallel ranks",
    "pp": "pipeline stages",
    "dp": "replicas",
    "dcp": "decode-context-parallel ranks",
    "ep": "expert-parallel ranks",
    "block_size": "tokens per block",
    "requests": "requests",
}
_MACHINE = "Machine"
_CACHE = "Cache"


def completer(*words: str) -> Callable[[str], list[str]]:
    """Return a shell completion function that completes the words in `words`."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def complete_model(incomplete: str) -> list[str]:
    """Return the model names of the catalogue that begin with `incomplete`."""
    return completer(*catalogue())(incomplete)


def _option(help_text: str, panel: str, *words: str, flag: str | None = None) -> Any:
    """Return a typer option that `--help` lists in a panel; the shell completes `words`."""
    return typer.Option(
        *([flag] if flag else []),
        help=help_text,
        rich_help_panel=panel,
        autocompletion=completer(*words) if words else None,
        show_default=flag is None,
    )


MODEL = typer.Argument(
    metavar="MODEL",
    help="A name from `kvatlas models`, a config.json or its folder, or a hub id.",
    autocompletion=complete_model,
    show_default=False,
)

MODELS = typer.Argument(
    metavar="MODEL...",
    help="Names from `kvatlas models`, config.json files or folders, or hub ids.",
    autocompletion=complete_model,
    show_default=False,
)

_LENGTHS = (
    "Tokens of the longest request: 32768, 32K (also 32768) or 32k (32000). "
    "[dim]By default 32768, or the model's maximum if that is less.[/]"
)
_MEMORY = "Cache memory per rank: 60GiB, 80GB or bytes. [dim]By default 80GiB.[/]"
_GPU = (
    "GPUs: H100, 8xH100, ... Caches get the memory that the weights leave free. Replaces --memory."
)
_UTILIZATION = (
    "With --gpu: share of the GPU memory that the engine may use. [dim]By default 0.9.[/]"
)
_WEIGHTS = "With --gpu: format of the weights: fp8, nvfp4, ... [dim]By default the checkpoint's.[/]"
_OVERHEAD = (
    "With --gpu: memory that is neither weights nor cache; auto: as in `kvatlas budget`. "
    "[dim]By default 3GiB.[/]"
)
_TP = "Tensor-parallel ranks. [dim]By default 1; with --gpu, GPUs / (pp x dp).[/]"
_DP = (
    "Data-parallel replicas, each with its own cache. "
    "[dim]By default 1; with --gpu and --tp, GPUs / (tp x pp).[/]"
)
_EP = (
    "With --gpu: expert-parallel ranks. "
    "[dim]By default all GPUs, if experts are replicated otherwise.[/]"
)
_IN_FLIGHT = (
    "Tokens of a prefilling request that are scheduled but not computed yet. "
    "[dim]By default 8192 per batch in flight: 16384 with one pipeline stage.[/]"
)
_CHIP = (
    "CUDA chip on which vLLM selects its kernels: sm80, sm90, sm100, ... [dim]By default that of "
    "--gpu, else only rules that hold on every chip apply.[/]"
)
_RUNS_ON = "Only plans that this engine can run: vllm, vllm@0.32, ... [dim]By default any plan.[/]"
_REQUESTS = "Store recurrent states in a separate pool for this many requests."
_STATES = (
    "Where to store recurrent states: shared (in the pool of attention), apart (in a separate "
    "pool) or auto."
)
_ORDERS = (*(layout.order for layout in ENGINE_LAYOUTS), "NHD", "HND")


TokenizerOption = Annotated[
    str | None,
    typer.Option(
        help="For a trace with text: a tokenizer.json, its folder or a hub id. "
        "[dim]By default, 4 bytes count as one token.[/]",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """A model and all options of its plan."""

    model: Annotated[str, MODEL]
    gpu: Annotated[str | None, _option(_GPU, _MACHINE, *GPUS)] = None
    memory: Annotated[str | None, _option(_MEMORY, _MACHINE)] = None
    utilization: Annotated[float | None, _option(_UTILIZATION, _MACHINE)] = None
    overhead: Annotated[str | None, _option(_OVERHEAD, _MACHINE)] = None
    weights_dtype: Annotated[str | None, _option(_WEIGHTS, _MACHINE, *NAMED_FORMATS)] = None
    tp: Annotated[int | None, _option(_TP, _MACHINE)] = None
    pp: Annotated[int, _option("Pipeline stages.", _MACHINE)] = 1
    dp: Annotated[int | None, _option(_DP, _MACHINE)] = None
    dcp: Annotated[int, _option("Decode-context-parallel ranks.", _MACHINE)] = 1
    ep: Annotated[int | None, _option(_EP, _MACHINE)] = None
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
        _option(
            "Order of the axes in memory: BLHNC, NHD, ... See `kvatlas layouts`.", _CACHE, *_ORDERS
        ),
    ] = None
    backend: Annotated[
        str | None,
        _option(
            "vLLM's attention backend. [dim]By default its choice on Hopper.[/]", _CACHE, *BACKENDS
        ),
    ] = None
    policy: Annotated[
        str,
        _option(
            "How to plan: atlas (small blocks), vllm (the exact plan of the newest known release), "
            "vllm@0.32 (of this release) or uniform (one group).",
            _CACHE,
            *POLICIES,
            *VERSIONED,
        ),
    ] = "atlas"
    chip: Annotated[str | None, _option(_CHIP, _CACHE, *CHIPS)] = None
    pack: Annotated[
        str,
        _option(
            "Hybrid models: attention layers that share a page with a recurrent state, or auto.",
            _CACHE, "auto", "1", "2", "4", "8",
        ),
    ] = "auto"  # fmt: skip
    states: Annotated[str, _option(_STATES, _CACHE, "auto", "shared", "apart")] = "auto"
    runs_on: Annotated[str | None, _option(_RUNS_ON, _CACHE, "vllm", *VERSIONED)] = None
    block_size: Annotated[
        int | None, _option("Tokens per block. Hybrid models may enlarge it.", _CACHE)
    ] = None
    prefix_caching: Annotated[
        bool,
        _option(
            "Plan without prefix caching: recurrent states are not kept at block ends.",
            _CACHE,
            flag=" /--no-prefix-caching",
        ),
    ] = True

    def plan(self, **changes: Any) -> Plan:
        """Return the plan with these options, some of them replaced by `changes`."""
        return plan_in(self.fit(**changes))

    def fit(self, **changes: Any) -> Plan | Fit:
        """Return a plan for a cache of size `memory` or, if `gpu` is set, a fit on these GPUs.

        `changes` replaces some of the options.
        """
        options = self._options(changes)
        if options["gpu"] is not None:
            sizes = GivenSizes(**{name: options[name] for name in _TOPOLOGY})
            return self.fitting(**changes).given(find_gpus(options["gpu"]), sizes)
        for name, default in OF_GPUS.items():
            if options.pop(name) != default:
                flag = "--" + name.replace("_", "-")
                hint = f"Add --gpu, or omit {flag}"
                raise contradictory(f"{flag} without --gpu", hint, f"{flag} requires --gpu")
        dp = options.pop("dp")
        positive(1 if dp is None else dp, "dp")
        options["memory"] = DEFAULT_MEMORY if options["memory"] is None else options["memory"]
        options["tp"] = 1 if options["tp"] is None else options["tp"]
        return plan(options.pop("model"), **options)

    def fitting(self, **changes: Any) -> Fitting:
        """Return a `Fitting` of the model on `gpu`, with some options replaced by `changes`."""
        options = self._options(changes) | {"model": self.model}
        if options.pop("memory") is not None:
            raise contradictory("--memory and --gpu", "Pass either --memory or --gpu")
        gpu = find_gpus(options.pop("gpu")).gpu
        skipped = [name for name in ("utilization", "overhead") if options[name] is None]
        for name in (*_TOPOLOGY, *skipped):
            del options[name]
        return Fitting(options.pop("model"), gpu, **options)

    def _options(self, changes: dict[str, Any]) -> dict[str, Any]:
        options = dataclasses.asdict(self) | changes
        pack = options["pack"]
        if pack != "auto":
            options["pack"] = number(pack, f"{pack!r} is neither auto nor a number.", "'--pack'")
        for name, what in _COUNTS.items():
            if isinstance(options[name], int) and options[name] < 1:
                flag = "--" + name.replace("_", "-")
                hint = f"Pass the number of {what}, at least 1"
                raise AtlasError(
                    Code.BAD_SIZE, f"{flag} must be at least 1", got=options[name], hint=hint
                )
        return options

    def load(self) -> Model:
        """Load the config of the model."""
        return Model.load(self.model)


def plan_in(found: Plan | Fit) -> Plan:
    """Return a plan, or the plan of a fit; if the model does not fit, raise the fit's error."""
    if isinstance(found, Plan):
        return found
    if found.plan is None:
        raise found.refusal or AssertionError("neither a plan nor a refusal")
    return found.plan


def contradictory(
    got: str, hint: str, problem: str = "These options cannot be combined"
) -> AtlasError:
    """Return the error for options that cannot be combined, or that lack another option."""
    return AtlasError(Code.CONTRADICTORY, problem, got=got, hint=hint)


def takes_plan_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the plan options to a command's signature; the command receives one `PlanOptions`."""
    return _spread(command, {}, lambda given: PlanOptions(**given))


def takes_models(command: Callable[..., None]) -> Callable[..., None]:
    """Add several models and the other plan options to a command's signature.

    The command receives a list of `PlanOptions`, one for each model.
    """
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
    """Return a command like `command` whose first parameter is replaced by the plan options.

    `instead` maps names of plan options to parameters that replace them. The values of the options
    are passed to `made`, and the result of `made` is the first argument of `command`.
    """
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
    # typer reads `__signature__`. Type checkers do not know this attribute, hence `vars`.
    vars(spread)["__signature__"] = own.replace(parameters=parameters)
    return spread


def number(text: str, problem: str, where: str) -> int:
    """Return `text` as an integer; else raise `BadParameter(problem)` for the flag `where`."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(problem, param_hint=where) from None
