"""A worker's side in a process that is killed: memory in vLLM's shapes, without an engine."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from kvatlas.engines.vllm.orders import OfferOrder, PullOrder, RemoteRequest
from tests.vllm.test_worker_side import DST, SRC, Ranks, make_plan
from tests.wire.forking import forked

SMALL: dict[str, Any] = {"how": "staged", "piece": 4096, "buffers": 2, "lease_seconds": 3.0}
"""Many pieces, one after the other: there is time to strike between them."""
SEED = 1


def serve(pipe: Connection, block: int) -> None:
    """Be one rank that offers or pulls what it is told to, until it is killed or let go."""
    ranks = Ranks(make_plan(block), SEED, **SMALL)
    pipe.send(ranks.remote(149).endpoints)
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return ranks.close()
        if isinstance(order, OfferOrder):
            ranks.order(offers=[order])
        else:
            ranks.order(pulls=[order])
        pipe.send("begun")


class KillableWorker:
    """That process, from the side of whoever kills it."""

    def __init__(self, block: int) -> None:
        self.process, self._pipe = forked(serve, block)
        self._endpoints: tuple[str, ...] = ()

    @property
    def endpoints(self) -> tuple[str, ...]:
        if not self._endpoints:
            assert self._pipe.poll(60), "it does not start"
            self._endpoints = self._pipe.recv()
        return self._endpoints

    def offer(self, name: str) -> PullOrder:
        """Have it offer a request; what reads that."""
        self._do(OfferOrder(name, name, SRC, 149))
        told = RemoteRequest(version=1, request=name, tokens=149, endpoints=self.endpoints)
        return PullOrder(name, told, DST, 0, 149)

    def pull(self, order: PullOrder) -> None:
        """Have it read a request of somebody else."""
        self._do(order)

    def _do(self, order: Any) -> None:
        assert self.endpoints
        self._pipe.send(order)
        assert self._pipe.poll(60)
        self._pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        self._pipe.close()
        self.process.join(20)
        self.process.kill()
        self.process.join()
