"""Costs that are measured on a simulated link, whose true costs are known, on a busy machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvatlas.routing import Costs
from kvatlas.wire.client.link_measurement import Clock, measure

PIECE = 4 << 20
RUNS, LENGTH = 8928, 512
"""A request of 31 tokens of Qwen3-8B, from pages by layer to pages by head."""


@dataclass
class SimulatedLink:
    """A link with these costs. Other work interrupts copies `busy` times per second."""

    run: float
    wire: float
    scatter_rate: float
    busy: int = 0
    seed: int = 0
    fixed: float = 4e-4
    own_share: float = 0.4
    """The part of the time that the reading thread itself computes."""
    piece: int = PIECE
    wall: float = 0.0
    cpu: float = 0.0
    most_runs: int = 0
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def read(self, count: int, length: int) -> Callable[[], None]:
        assert (2 * count - 1) * length <= self.piece, "the runs and their gaps fit into a buffer"
        self.most_runs = max(self.most_runs, count)
        return lambda: self._take(
            self.fixed + (count - 1) * self.run + count * length / self.wire, self.own_share
        )

    def scatter(self, count: int, length: int) -> Callable[[], None]:
        return lambda: self._take(count * length / self.scatter_rate, 1.0)

    def costs(self) -> Costs:
        return measure(self, LENGTH, Clock(lambda: self.wall, lambda: self.cpu))

    def _take(self, seconds: float, own_share: float) -> None:
        """Advance the clocks. Interruptions only ever make a copy slower."""
        self.cpu += seconds * own_share * (1 + 0.02 * self.rng.random())
        interruptions = self.rng.poisson(seconds * self.busy)
        self.wall += seconds + self.rng.exponential(0.01, interruptions).sum()


Truth = dict[str, Any]
TCP: Truth = {"run": 1e-6, "wire": 3e9, "scatter_rate": 7e9}
SHM: Truth = {"run": 5e-8, "wire": 1e10, "scatter_rate": 3e9, "own_share": 1.0, "fixed": 1e-4}
SLOW: Truth = {"run": 4e-5, "wire": 1.5e9, "scatter_rate": 7e9}


def best(costs: Costs) -> str:
    """The cheaper way for the request, where pages are read whole at the source."""
    nbytes = RUNS * LENGTH
    direct, coalesced = costs.direct(RUNS, nbytes), costs.coalesced(144, nbytes)
    return "direct" if direct <= coalesced else "coalesced"


@pytest.mark.parametrize("true", [TCP, SHM, SLOW])
def test_an_idle_machine_gives_the_true_costs(true: Truth) -> None:
    costs = SimulatedLink(**true).costs()
    assert costs.descriptor == pytest.approx(true["run"], rel=0.1)
    assert costs.wire == pytest.approx(true["wire"], rel=0.01)
    assert costs.copy == pytest.approx(true["scatter_rate"], rel=0.01)
    assert costs.piece == PIECE


@pytest.mark.parametrize(("true", "way"), [(TCP, "coalesced"), (SLOW, "coalesced")])
@pytest.mark.parametrize("busy", [30, 300, 1000])
def test_a_busy_machine_does_not_hide_the_cost_of_a_run(true: Truth, way: str, busy: int) -> None:
    for seed in range(200):
        costs = SimulatedLink(**true, busy=busy, seed=seed).costs()
        assert best(costs) == way, (seed, costs)
        assert costs.descriptor >= 0.3 * true["run"]


@pytest.mark.parametrize("busy", [30, 300])
def test_a_busy_machine_does_not_make_cheap_runs_expensive(busy: int) -> None:
    chosen = [best(SimulatedLink(**SHM, busy=busy, seed=seed).costs()) for seed in range(200)]
    assert chosen.count("direct") >= 198


def test_an_error_of_the_bandwidth_does_not_change_the_cost_of_a_run() -> None:
    """Reads of a whole piece are always interrupted, because they take longest."""

    class Interrupted(SimulatedLink):
        def read(self, count: int, length: int) -> Callable[[], None]:
            delayed = length + (3 << 24) if length == self.piece else length
            return lambda: SimulatedLink._take(
                self, self.fixed + (count - 1) * self.run + count * delayed / self.wire, 0.4
            )

    costs = Interrupted(**TCP).costs()
    assert costs.wire < 1e9
    assert costs.descriptor == pytest.approx(TCP["run"], rel=0.1)


def test_slow_links_are_measured_with_few_runs() -> None:
    few, many = SimulatedLink(**SLOW), SimulatedLink(**SHM)
    few.costs()
    many.costs()
    assert few.most_runs == 256 < many.most_runs == 2048


@pytest.mark.parametrize("piece", [1, 64, 512, 1023, 4096])
def test_buffers_smaller_than_a_few_runs_are_measured_too(piece: int) -> None:
    costs = SimulatedLink(**TCP, piece=piece).costs()
    assert costs.piece == piece
    assert costs.descriptor >= 0
