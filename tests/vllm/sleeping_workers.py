"""What vLLM does only on GPUs during sleep: caches lose their content, and the connector is told.

An engine that imports this module does so on a CPU.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.worker.cpu_worker import CPUWorker


def sleep(self: Any, level: int = 1) -> None:
    connector = get_kv_transfer_group()
    assert connector.get_handshake_metadata() is not None
    for _ in range(2):  # vLLM may call either method again
        connector.unregister_kv_caches()
    assert connector.get_handshake_metadata() is None
    for cache in self.model_runner.kv_caches:
        cache.fill_(1000.0 * level)


def wake_up(self: Any, tags: list[str] | None = None) -> None:  # noqa: ARG001
    for _ in range(2):
        get_kv_transfer_group().restore_kv_caches()


CPUWorker.sleep = sleep
CPUWorker.wake_up = wake_up
