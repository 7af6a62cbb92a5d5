"""What sharing a tier is worth: the table of `docs/how-to/tiers.md`, from a trace of real requests.

    python -m benchmarks.fleet_hits TRACE

Requests go to engines in turn. Alone, each engine finds what it has computed itself, in its own
memory; with a shared tier, what any of them has computed, as long as the tier has it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from kvatlas.planning import plan
from kvatlas.simulate import Trace, read_trace, simulate

MODEL = "Qwen3-8B"
ENGINES = (1, 4, 16)
OWN = 40 << 30
"""Bytes of each engine's cache."""


def share_of(trace: Trace, engine: int, engines: int) -> Trace:
    """The requests that one of several engines gets, in turn."""
    mine = np.arange(engine, len(trace), engines)
    sizes = np.diff(trace.starts)[mine]
    ids = [trace.ids[trace.starts[n] : trace.starts[n + 1]] for n in mine]
    renumbered = np.unique(np.concatenate(ids), return_inverse=True)[1]
    return Trace(
        f"{trace.name}, {engine} of {engines}",
        trace.block,
        renumbered,
        np.concatenate([[0], np.cumsum(sizes)]),
        trace.lengths[mine],
        trace.outputs[mine],
        trace.times[mine],
    )


def found(trace: Trace, memory: int) -> int:
    """Prompt tokens that a cache of so many bytes finds again."""
    return simulate(plan(MODEL, memory=memory, block_size=64), trace).found


def main(path: Path) -> None:
    trace = read_trace(path)
    own = OWN >> 30
    print(f"| engines | each alone, {own} GiB | one tier of as many bytes | what is computed |")
    print("|--:|--:|--:|--:|")
    for engines in ENGINES:
        alone = sum(found(share_of(trace, n, engines), OWN) for n in range(engines)) / trace.tokens
        together = found(trace, engines * OWN) / trace.tokens
        less = (1 - together) / (1 - alone)
        said = f"{engines} | {alone:.1%} | {together:.1%}, {engines * own} GiB | {less:.0%}"
        print(f"| {said} |", flush=True)
    unlimited = simulate(plan(MODEL, memory=OWN, block_size=64), trace).ceiling
    print(f"\nA memory without bounds finds {unlimited:.1%}.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
