"""Messages that the connector's scheduler and workers send each other through vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvatlas.engines.vllm.orders import StepOrders
from kvatlas.engines.vllm.stored_checkpoints import add_counts


@dataclass
class KVAtlasStep(KVConnectorMetadata):
    """The orders that the scheduler sends to the workers with each step.

    An order is a transfer to start, a transfer to cancel, or blocks to keep or release.
    """

    orders: StepOrders = field(default_factory=StepOrders)
    idle: bool = False
    """Whether the step computes no tokens."""


@dataclass
class KVAtlasEndpoint(KVConnectorHandshakeMetadata):
    """The handshake metadata of one rank: its endpoint, and the plan of the tier that it opened.

    The plan is sent only if the tier is in an object store.
    """

    endpoint: str | None
    rows: bytes | None = None
    """The plan of the store's tier as JSON; None if the rank has not opened one."""


@dataclass
class KVAtlasStored(KVConnectorWorkerMetadata):
    """The number of workers that have stored each checkpoint of running requests.

    A checkpoint is a position at which a tier stores windows and recurrent states.
    """

    checkpoints: dict[int, int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVAtlasStored:
        """Return the sum of these counts and another worker's counts."""
        theirs = other.checkpoints if isinstance(other, KVAtlasStored) else {}
        return KVAtlasStored(add_counts(self.checkpoints, theirs))
