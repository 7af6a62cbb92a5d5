"""Counters of what was moved: plain values, and the text that Prometheus reads."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Metrics:
    """Bytes, descriptors, seconds by phase, and how transfers ended.

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
        """Count bytes, descriptors, messages."""
        with self._lock:
            self.values.update(amounts)

    def ended(self, way: str, how: str) -> None:
        """Count a transfer by how it ended: ok, or the code of its refusal."""
        with self._lock:
            self.outcomes[way, how] += 1

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds of a phase."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.seconds[name] += time.perf_counter() - begun

    def prometheus(self) -> str:
        """Everything as Prometheus reads it."""
        with self._lock:
            lines = []
            for name, value in sorted(self.values.items()):
                lines += [
                    f"# TYPE kvatlas_wire_{name}_total counter",
                    f"kvatlas_wire_{name}_total {value}",
                ]
            lines.append("# TYPE kvatlas_wire_phase_seconds_total counter")
            lines += [
                f'kvatlas_wire_phase_seconds_total{{phase="{phase}"}} {seconds:.6f}'
                for phase, seconds in sorted(self.seconds.items())
            ]
            lines.append("# TYPE kvatlas_wire_transfers_total counter")
            lines += [
                f'kvatlas_wire_transfers_total{{way="{way}",outcome="{how}"}} {count}'
                for (way, how), count in sorted(self.outcomes.items())
            ]
        return "\n".join(lines) + "\n"
