"""`kvatlas plan --compare`: compare plans that differ in one option."""

from __future__ import annotations

from typing import Any

import typer
from rich.text import Text

from kvatlas.cli.failures import plain
from kvatlas.cli.options import (
    DEFAULT_MEMORY,
    POLICIES,
    PlanOptions,
    contradictory,
    number,
    plan_in,
)
from kvatlas.errors import AtlasError
from kvatlas.geometry import ENGINE_LAYOUTS
from kvatlas.models import Model
from kvatlas.planning import BACKENDS, Fit, Plan, backends_of
from kvatlas.planning.planner import default_length
from kvatlas.planning.request import length
from kvatlas.planning.sized_layers import kind_of

AXES = {
    axis: axis.replace("-", "_")
    for axis in (
        "policy", "kv-dtype", "tp", "dcp", "dp", "pp", "pack", "memory", "max-len", "layout",
        "backend", "block-size", "states", "chip",
    )
}  # fmt: skip
"""Options that can be compared: their names on the command line and in `plan()`."""
_NUMBERS = ("tp", "dcp", "dp", "pp", "block-size")

_USUAL = {
    "policy": POLICIES,
    "tp": ("1", "2", "4", "8", "16"),
    "dcp": ("1", "2", "4", "8", "16"),
    "dp": ("1", "2", "4", "8"),
    "pp": ("1", "2", "4", "8"),
    "pack": ("auto", "1", "2", "4", "8", "16"),
    "memory": ("20GiB", "40GiB", "60GiB", "80GiB", "120GiB", "160GiB"),
    "max-len": ("4K", "8K", "16K", "32K", "64K", "128K"),
    "layout": tuple(layout.order for layout in ENGINE_LAYOUTS),
    "block-size": ("16", "32", "64", "128", "256"),
    "states": ("shared", "apart"),
    "chip": ("sm80", "sm90", "sm100"),
}
"""The values to compare, by option, if the user lists none."""
_DENSE = (
    "auto", "fp8", "int8_per_token_head", "int4_per_token_head", "nvfp4", "turboquant_4bit_nc",
)  # fmt: skip
_LATENT = ("auto", "fp8", "fp8_ds_mla", "nvfp4_ds_mla")


_FIGURES = (
    "policy", "tp", "pack", "memory", "max_len", "layout", "block_size", "num_blocks",
    "bytes_per_block", "tokens", "requests_at_max_len", "requests_decoding", "padding_share",
    "warnings",
)  # fmt: skip
"""Keys that are copied from a plan's summary to a row."""

Row = dict[str, Any]
"""The data of one compared plan: `compare` (the option), `value`, `_FIGURES`, `topology` (with
`--gpu`), `way`, `refused`."""


def axes_of(texts: list[str]) -> dict[str, tuple[str, ...]]:
    """Parse the arguments of `--compare`: return the values to compare, by option.

    An option without listed values has an empty tuple. `usual` returns the values to compare.

    >>> axes_of(["policy,tp", "pack=1,3"])
    {'policy': (), 'tp': (), 'pack': ('1', '3')}
    """
    axes: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, given, values = text.partition("=")
        names = [name] if given else text.split(",")
        for one in (part.strip().lower().replace("_", "-") for part in names):
            if one not in AXES:
                raise typer.BadParameter(
                    f"{one!r} is not one of {', '.join(AXES)}.", param_hint="'--compare'"
                )
            axes[one] = tuple(v.strip() for v in values.split(",") if v.strip())
    return axes


def compared_plans(options: PlanOptions, axis: str, values: tuple[str, ...] = ()) -> list[Row]:
    """Make a plan with each value of the option `axis`, and return one row of figures per plan.

    In each row, `ratio` is the number of decoding requests that fit, divided by this number in the
    first row that has a plan.
    """
    check_memory_axis(options, axis)
    model = options.load()
    rows = [_compared(options, model, axis, value) for value in values or usual(model, axis)]
    first = next((row["requests_decoding"] for row in rows if not row["refused"]), None)
    for row in rows:
        row["ratio"] = None if row["refused"] else round(row["requests_decoding"] / first, 4)
    return rows


def check_memory_axis(options: PlanOptions, axis: str) -> None:
    """Raise an error if memory sizes are compared although `--gpu` determines the memory."""
    if axis == "memory" and options.gpu is not None:
        hint = "Omit --gpu to compare memory sizes"
        raise contradictory("--compare memory and --gpu", hint)


def compared_title(options: PlanOptions, model: Model, *axes: str) -> Text:
    """Return a title that names the model and the options that all compared plans share.

    The title can contain ranks, memory and request length. It omits the compared options, `axes`.
    """
    sizes = {name: getattr(options, name) for name in ("tp", "pp", "dp", "dcp") if name not in axes}
    parts = [f"{name} {n}" for name, n in sizes.items() if n and (n > 1 or name == "tp")]
    if "memory" not in axes:
        parts.append(options.gpu or f"{options.memory or DEFAULT_MEMORY} per rank")
    if "max-len" not in axes:
        longest = length(options.max_len) if options.max_len else default_length(model)
        parts.append(f"requests of {longest:,} tokens")
    title = Text(plain(model.name), style="bold")
    return title.append("  " + ", ".join(parts), style="not bold dim")


def usual(model: Model, axis: str) -> tuple[str, ...]:
    """Return the values of the option `axis` that `--compare` uses if none are listed."""
    if axis == "backend":
        families = {used.family for used in backends_of(model).values() if used} - {"other"}
        return tuple(name for name, known in BACKENDS.items() if known.family in families)
    if axis != "kv-dtype":
        return _USUAL[axis]
    latent = any("mla" in kind_of(layer.spec) for layer in model.layers)
    known = _LATENT if latent else _DENSE
    # A dtype that the checkpoint specifies comes first.
    return known if model.cache in known else (model.cache, *known)


def way_of(plan: Plan) -> str | None:
    """Return where a hybrid model's plan stores recurrent states; None for other models.

    `pack N` means that a state shares a page with N attention layers. `states apart` means that
    states have a separate pool.
    """
    states = {group.pool for group in plan.groups if group.kind == "recurrent"}
    others = {group.pool for group in plan.groups if group.kind != "recurrent"}
    if not states or not others:
        return None
    return f"pack {plan.pack}" if states & others else "states apart"


def _compared(options: PlanOptions, model: Model, axis: str, value: str) -> Row:
    problem = f"{value!r} is not a number."
    shown = number(value, problem, "'--compare'") if axis in _NUMBERS else value
    row: Row = {"compare": axis, "value": shown, **dict.fromkeys(_FIGURES)}
    ranks = options.tp or (None if options.gpu else 1)  # with --gpu, the number of GPUs decides
    row |= {"policy": options.policy, "tp": ranks, "topology": None}
    row |= {"way": None, "refused": None}
    row |= {axis: shown} if axis in ("policy", "tp") else {}
    changed = {AXES[axis]: shown}
    try:
        found = options.fit(**{"model": model, **changed})
        made = plan_in(found)
    except AtlasError as refusal:
        return row | {"refused": {"code": str(refusal.code), "message": str(refusal)}}
    summary = made.summary()
    row |= {name: summary[name] for name in _FIGURES} | {"way": way_of(made)}
    row["warnings"] = list(found.warnings)
    if isinstance(found, Fit):
        replicas, row["topology"] = found.topology.dp, str(found.topology)
    else:
        replicas = int(changed.get("dp") or options.dp or 1)
    row["tokens"] *= replicas
    if replicas > 1:  # a request does not continue on another replica, so fractions do not add up
        for name in ("requests_at_max_len", "requests_decoding"):
            row[name] = int(row[name]) * replicas
    return row
