"""How long planning takes, for every model of the catalogue."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from itertools import product
from typing import Any

from benchmarks import vllm_peer
from benchmarks.timing import median_ms, show
from kvatlas import AtlasError
from kvatlas.models import Model, catalogue
from kvatlas.planning import plan
from kvatlas.planning.backends import backends_of
from kvatlas.planning.block_size import block_size
from kvatlas.planning.engine_rules import RELEASES
from kvatlas.planning.plan_data import DECODING
from kvatlas.planning.request import PlanRequest
from kvatlas.planning.sized_layers import kind_of, page_of, size_layers

TPS = (1, 2, 4, 8)
MEMORIES = ("20GiB", "60GiB", "140GiB")
LENGTHS = (512, 4096, 16_384, 32_768)
CHIPS = ("sm80", "sm90", "sm100")
RELEASE_MEMORY = "60GiB"
PROMISE = 0.99
MEMORY = 4 * 2**40
"""Enough for one long request of every model at tp 1."""


def ours() -> None:
    """Each model planned three times from cold: the least CPU time of the three."""
    rows = []
    for policy in ("vllm", "atlas"):
        taken = {}
        for name in catalogue():
            model = Model.load(name)
            try:
                taken[name] = min(_planned(model, policy) for _ in range(3))
            except AtlasError:
                continue
        worst = max(taken, key=lambda name: taken[name])
        rows.append(
            [
                policy,
                str(len(taken)),
                f"{statistics.median(taken.values()):.1f}",
                f"{taken[worst]:.1f}",
                worst,
            ]
        )
    loads = {name: _timed(name) for name in catalogue()}
    slowest = max(loads, key=lambda name: loads[name])
    rows.append(
        [
            "Model.load alone",
            str(len(loads)),
            f"{statistics.median(loads.values()):.1f}",
            f"{loads[slowest]:.1f}",
            slowest,
        ]
    )
    show(
        "Planning each model of the catalogue, nothing remembered, CPU time (bar: 50 ms at most)",
        ["policy", "models", "median ms", "worst ms", "worst model"],
        rows,
    )


def _planned(model: Model, policy: str) -> float:
    page_of.cache_clear()
    start = time.process_time()
    plan(model, memory=MEMORY, policy=policy)
    return (time.process_time() - start) * 1e3


def _timed(name: str) -> float:
    start = time.process_time()
    Model.load(name)
    return (time.process_time() - start) * 1e3


def beside_vllm() -> None:
    """Grouping and sizing of the same layers by vLLM, without reading a config."""
    if not vllm_peer.installed():
        print("vLLM is not installed here: its own planning is not timed.\n")
        return
    rows = []
    for name in ("Llama-3.1-70B", "gpt-oss-120b", "Gemma-3-27B", "Qwen3.5-397B-A17B", "Kimi-K3"):
        model = Model.load(name)
        request = PlanRequest(
            model=model, backends=backends_of(model, None), memory=MEMORY, max_len=32768
        )
        size = block_size(request)
        layers = size_layers(request, block=size.tokens, state_padding=size.state_padding)
        theirs = median_ms(vllm_peer.planner(layers, "LBNHC", MEMORY))
        mine = median_ms(lambda m=model: plan(m, memory=MEMORY, policy="vllm"))  # type: ignore[misc]
        rows.append([name, f"{mine:.1f}", f"{theirs:.1f}"])
    show(
        "Whole plans here, checked, beside vLLM's grouping and sizing alone",
        ["model", "kvatlas ms", "vLLM ms"],
        rows,
    )


def promise() -> None:
    """Policy atlas beside vLLM's, at every length and phase that was asked for."""
    cells = held = models = 0
    least, own, hybrids, smaller = 10.0, [], 0, []
    for name in catalogue():
        model, alike, small = Model.load(name), [], []
        for tp, memory in product(TPS, MEMORIES):
            try:
                theirs = plan(model, memory=memory, tp=tp, policy="vllm")
            except AtlasError:
                continue
            ours = plan(model, memory=memory, tp=tp)
            for length, in_flight in product(LENGTHS, (None, DECODING)):
                share = ours.requests(length, in_flight=in_flight) / theirs.requests(
                    length, in_flight=in_flight
                )
                cells, held, least = cells + 1, held + (share >= PROMISE), min(least, share)
            alike.append(ours.regions == theirs.regions)
            small.append(ours.block_size < theirs.block_size)
        kinds = {kind_of(layer.spec) for layer in model.layers}
        models += 1
        if "recurrent" in kinds and len(kinds) > 1:
            hybrids += 1
            own += [name] if all(alike) else []
            smaller += [name] if any(small) else []
    show(
        "Policy atlas beside vLLM: requests that fit, prefilling and decoding (bar: all cells)",
        [
            "cells held",
            "of",
            "least share",
            "models",
            "hybrids",
            "smaller block",
            "vLLM's own plan",
        ],
        [
            [
                f"{held:,}",
                f"{cells:,}",
                f"{least:.4f}",
                str(models),
                str(hybrids),
                str(len(smaller)),
                f"{len(own)}: {', '.join(own)}" if own else "0",
            ]
        ],
    )


def releases() -> None:
    """Policy atlas beside the plan of each release of vLLM on three chips."""
    rows = []
    for release, chip in product(RELEASES, CHIPS):
        shares = [one for name in catalogue() for one in _shares(name, release, chip)]
        held = sum(share >= PROMISE for share in shares)
        least = f"{min(shares):.4f}"
        rows.append([release, chip, f"{held:,}", f"{len(shares):,}", least, f"{max(shares):.2f}"])
    show(
        f"Policy atlas beside each release, {RELEASE_MEMORY} per rank (bar: all cells)",
        ["vLLM", "chip", "cells held", "of", "least share", "most"],
        rows,
    )


def _shares(name: str, release: str, chip: str) -> Iterator[float]:
    """Yield the requests that atlas fits relative to vLLM, per tp, length and phase."""
    model = Model.load(name)
    for tp in TPS:
        ask: dict[str, Any] = {"memory": RELEASE_MEMORY, "tp": tp, "chip": chip}
        try:
            theirs = plan(model, policy=f"vllm@{release}", **ask)
        except AtlasError:
            continue
        ours = plan(model, policy=f"atlas@{release}", **ask)
        for length, in_flight in product(LENGTHS, (None, DECODING)):
            yield ours.requests(length, in_flight=in_flight) / theirs.requests(
                length, in_flight=in_flight
            )


def main() -> None:
    ours()
    promise()
    releases()
    beside_vllm()


if __name__ == "__main__":
    main()
