"""Reads of the connector in an engine's process: which, and how many bytes."""

from __future__ import annotations

from typing import Any


def bytes_on_their_way() -> int:
    """What has arrived so far of requests that have not arrived as a whole."""
    return sum(one.transfer.moved for one in pulls() if one.transfer is not None)


def bytes_pulled() -> int:
    """Bytes that the connector of this process has read from other engines."""
    worker = _worker()
    return 0 if worker is None else int(worker.node.metrics.values["bytes"])


def pulls() -> list[Any]:
    """Requests that the connector of this process is reading."""
    worker = _worker()
    return [] if worker is None else list(worker._pulls.values())


def _worker() -> Any:
    """The connector's worker side; None without the connector."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return getattr(get_kv_transfer_group(), "_worker", None) if has_kv_transfer_group() else None
