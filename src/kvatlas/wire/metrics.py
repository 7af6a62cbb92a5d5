"""Counters of transfers, as plain values and in the Prometheus text format."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Metrics:
    """Counts of bytes and descriptors, seconds by phase, and outcomes of transfers.

    >>> made = Metrics()
    >>> made.add(bytes=4096, descriptors=2)
    >>> made.ended("pull", "ok")
    >>> made.values["bytes"], made.outcomes["pull", "ok"]
    (4096, 1)
    >>> print(made.prometheus().splitlines()[1])
    kvatlas_wire_bytes_total 4096
    """

    def __init__(self) -> None:
        self.values: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def add(self, **amounts: int) -> None:
        """Add each amount to the counter with the same name."""
        with self._lock:
            for name, amount in amounts.items():
                self.values[name] += amount

    def ended(self, direction: str, outcome: str) -> None:
        """Count a transfer by direction and outcome: `ok`, or the code of its error."""
        with self._lock:
            self.outcomes[direction, outcome] += 1

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the duration of the `with` block to the seconds of a phase."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.seconds[name] += time.perf_counter() - begun

    def prometheus(self) -> str:
        """Return all metrics in the Prometheus text format."""
        with self._lock:
            counters = {name: {"": f"{n}"} for name, n in sorted(self.values.items())}
            phases, outcomes = sorted(self.seconds.items()), sorted(self.outcomes.items())
        counters["phase_seconds"] = {f'{{phase="{name}"}}': f"{s:.6f}" for name, s in phases}
        counters["transfers"] = {
            f'{{direction="{direction}",outcome="{outcome}"}}': f"{n}"
            for (direction, outcome), n in outcomes
        }
        lines = []
        for name, samples in counters.items():
            lines.append(f"# TYPE kvatlas_wire_{name}_total counter")
            lines += [f"kvatlas_wire_{name}_total{label} {n}" for label, n in samples.items()]
        return "\n".join(lines) + "\n"
