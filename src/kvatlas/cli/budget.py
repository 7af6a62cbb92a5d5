"""`kvatlas budget`: the memory of a GPU under vLLM, line by line, and the flags to paste."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.console import RenderableType
from rich.text import Text

from kvatlas.cli.app import Json, answer
from kvatlas.cli.failures import plain
from kvatlas.cli.options import MODEL, plan_in
from kvatlas.cli.tables import indented, notes, table
from kvatlas.geometry.byte_sizes import size
from kvatlas.models import Gpus, find_gpus
from kvatlas.planning import Budget, EngineLoad, Fit, Fitting, GivenSizes
from kvatlas.planning.engine_rules import RELEASES


def budget(
    model: Annotated[str, MODEL],
    *,
    gpu: Annotated[str, typer.Option(help="Number and type of the GPUs: 8xH100, H200.")],
    max_len: Annotated[
        str | None, typer.Option(help="Tokens of the longest request: 128K.")
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Cache dtype: fp8, nvfp4, ...")] = None,
    weights_dtype: Annotated[
        str | None, typer.Option(help="Format of the weights: fp8, nvfp4, ...")
    ] = None,
    utilization: Annotated[
        float, typer.Option(help="Share of the GPU memory that the engine may use.")
    ] = 0.9,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks.")] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline stages.")] = None,
    dp: Annotated[int | None, typer.Option(help="Replicas.")] = None,
    dcp: Annotated[int | None, typer.Option(help="Decode-context-parallel ranks.")] = None,
    ep: Annotated[int | None, typer.Option(help="Expert-parallel ranks.")] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Requests in a batch. By default vLLM's choice for the GPU.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens in a batch. By default vLLM's choice for the GPU.")
    ] = None,
    max_loras: Annotated[int, typer.Option(help="LoRA adapters in GPU memory.")] = 0,
    max_lora_rank: Annotated[int, typer.Option(help="Rank of the largest adapter.")] = 16,
    enforce_eager: Annotated[bool, typer.Option(help="No CUDA graphs.")] = False,
    release: Annotated[str | None, typer.Option(help="The release of vLLM: 0.32.")] = None,
    as_json: Json = False,
) -> None:
    """Divide the memory of a GPU under vLLM into weights, cache, activations and the rest.

    Each line includes its source and its error. The topology has the given sizes and serves the
    most users; a host has more than one pipeline stage only if no other topology fits. The last
    lines are flags of `vllm serve`.
    """
    machine = find_gpus(gpu)
    load = EngineLoad.default(
        machine.gpu,
        sequences=max_num_seqs,
        batched_tokens=max_num_batched_tokens,
        loras=max_loras,
        lora_rank=max_lora_rank,
        eager=enforce_eager,
        release=release,
    )
    options = {"max_len": max_len, "kv_dtype": kv_dtype, "weights_dtype": weights_dtype}
    policy = f"vllm@{load.release}" if load.release in RELEASES else "vllm"
    fitting = Fitting(
        model, machine.gpu, utilization=utilization, overhead=load, policy=policy, **options
    )
    found = _best(fitting, machine, GivenSizes(tp=tp, pp=pp, dp=dp, dcp=dcp, ep=ep))
    block = plan_in(found).block_size
    made = fitting.budget(found.topology)
    flags = made.flags(block)
    facts = {**made.as_dict(), "block_size": block, "flags": flags, "fit": found.as_dict()}
    answer(as_json, facts, *_parts(made, found, flags))


def _best(fitting: Fitting, gpus: Gpus, sizes: GivenSizes) -> Fit:
    """Return the best fit with one pipeline stage per host; if there is none, the best of all fits.

    With more stages, the CUDA graphs of each GPU are estimated to take less memory. The difference
    is smaller than the error of the estimate, so it is no reason for more stages.
    """
    plain = msgspec.structs.replace(sizes, pp=gpus.hosts)
    if sizes.pp is None and any(True for _ in plain.topologies(gpus)):
        found = fitting.best(gpus, plain)
        if found.plan is not None:
            return found
    return fitting.best(gpus, sizes)


def _parts(made: Budget, found: Fit, flags: tuple[str, ...]) -> list[RenderableType]:
    headline = (
        f"{size(made.kv)} for caches on each of {found.topology.gpus} {made.gpu} "
        f"({found.topology}), give or take {size(made.error)}. All of them serve "
        f"{found.users():,} decoding requests of {plan_in(found).max_len:,} tokens."
    )
    lines = table("", "size", "error", "source", words=(0, 3), wraps=(3,))
    for line in made.lines:
        name = line.name if line.inside else f"{line.name} *"
        lines.add_row(name, size(line.nbytes), size(line.error), plain(line.source))
    lines.add_row("caches", size(made.kv), size(made.error), f"the rest of {size(made.usable)}")
    legend = (
        f"* outside the engine's share of {made.utilization:.0%}, where {size(made.margin)} are "
        "left free."
    )
    pasted = Text(" \\\n  ".join(("vllm serve ...", *flags)), no_wrap=True)
    shown: list[RenderableType] = [Text(headline), indented(lines), Text(legend, style="dim")]
    return [*shown, *notes(found.warnings), pasted]
