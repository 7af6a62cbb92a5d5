"""Connector counters for vLLM's statistics log and for Prometheus."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from kvatlas.engines.vllm.exported_counters import COUNTERS
from kvatlas.engines.vllm.tier_worker import TierCounts
from kvatlas.engines.vllm.worker_side import PullCounts


@dataclass
class KVAtlasStats(KVConnectorStats):
    """Counts since the last collection, from one rank or summed over several."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    @classmethod
    def of(cls, *counts: PullCounts | TierCounts) -> KVAtlasStats:
        """Combine the counts of one rank: of reads from other engines, and of uses of the tier."""
        made = cls()
        for one in counts:
            made.data |= asdict(one)
        return made

    def reset(self) -> None:
        """Set all counts to zero."""
        self.data = asdict(PullCounts()) | asdict(TierCounts())

    def aggregate(self, other: KVConnectorStats) -> KVAtlasStats:
        """Add the counts of another rank to this object, and return this object."""
        self.data = {name: self.data[name] + other.data.get(name, 0) for name in COUNTERS}
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the values that vLLM prints in its periodic log line, by label."""
        pulls, seconds = self.data["pulls"], self.data["seconds"]
        return {
            "Requests read": int(pulls),
            "Failed": int(self.data["failures"]),
            "Expired": int(self.data["expired"]),
            "MB": round(self.data["nbytes"] / 1e6, 3),
            "Avg ms": round(1e3 * seconds / pulls, 3) if pulls else 0.0,
            "From the tier": int(self.data["tier_loads"]),
            "Tokens from the tier": int(self.data["tier_tokens"]),
            "Kept": int(self.data["tier_stores"]),
        }

    def is_empty(self) -> bool:
        """Return whether all counts are zero."""
        return not any(self.data.values())


class KVAtlasPromMetrics(KVConnectorPromMetrics):
    """The counts as Prometheus counters: `vllm:kvatlas_pulls` and so on."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(
                    name=f"vllm:kvatlas_{name}", documentation=about, labelnames=labelnames
                ),
                per_engine_labelvalues,
            )
            for name, about in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one engine's counts to its Prometheus counters."""
        for name, counter in self._counters.items():
            counter[engine_idx].inc(transfer_stats_data.get(name, 0))
