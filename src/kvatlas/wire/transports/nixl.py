"""NIXL over UCX: one-sided transfers between processes and machines.

A link describes a pool to NIXL as a grid: one row (address, length, device, stride, count) lists
all possible positions of runs with the most common length. A transfer is then two arrays of indices
into such rows. Only runs at other positions or of other lengths get separate rows. So a million
descriptors cost only two integer arrays.

A transport has one agent that serves peers. Every link reads and writes with a separate agent,
because only destroying an agent stops its operations (`nixl_link`).

NIXL does not check leases: it also reads memory whose lease has ended. The callers of this module
check that blocks are ready and leased.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar

from kvatlas.copying.memory import HOST, Memory
from kvatlas.errors import AtlasError
from kvatlas.wire.transports import errors, nixl_metadata
from kvatlas.wire.transports.base import Link, Separation, Shared, Transport
from kvatlas.wire.transports.nixl_agents import Agents, not_empty, rows_of, translated
from kvatlas.wire.transports.nixl_link import BETWEEN_LOOKS, NixlLink
from kvatlas.wire.transports.nixl_metadata import Kind
from kvatlas.wire.transports.nixl_pair import PairedNixlLink
from kvatlas.wire.transports.offer_board import OfferBoard

_CLOSING = 2.0
"""Seconds that `close` waits for operations in flight."""


class NixlTransport(Transport):
    """Moves bytes with NIXL agents.

    `kind` specifies where this end's memory is: "DRAM" on the host, or "VRAM" on GPUs. The two ends
    may have different kinds. `device` is the single network device that UCX uses and listens on, by
    its UCX name ("eth0", "mlx5_0:1"). The default is the environment variable UCX_NET_DEVICES, or
    else the loopback device. A device without RDMA raises an error unless `over_tcp` is set: over
    TCP, UCX may abort this process when a peer is killed or cancels a read.
    """

    name: ClassVar[str] = "nixl"
    separation: ClassVar[Separation] = "none"

    def __init__(
        self,
        *,
        kind: Kind = "DRAM",
        backend: str = "UCX",
        device: str | None = None,
        over_tcp: bool = False,
        shared: Shared = "all",
    ) -> None:
        super().__init__(shared=shared)
        self.kind, self.backend = kind, backend
        self._agents = Agents(kind, backend, device, over_tcp=over_tcp)
        self.beyond_host = self._agents.beyond_host
        self.guarantees = self._agents.guarantees
        # Names are unique, so that a restarted peer is not mistaken for its predecessor.
        self._name = f"kvatlas-{secrets.token_hex(16)}"
        self._agent: Any = self._agents.make(self._name, serves=True)
        self._made: set[NixlLink] = set()

    def _register(self, memory: Mapping[int, Memory]) -> None:
        memory = {pool: region for pool, region in memory.items() if self.shares(pool)}
        if memory:
            with translated():
                self._agent.register_memory(rows_of(memory), self.kind)
        if self.kind == "DRAM" and self.board is None:
            with suppress(AtlasError):  # no memory for a board: peers ask by message
                self.board = OfferBoard()

    def takes(self, device: str) -> bool:
        """Whether the transport can register the device's memory: VRAM of a GPU, or DRAM."""
        return (device == HOST) == (self.kind == "DRAM")

    def publish(self) -> bytes:
        """Return the address of the agent that serves peers, and the keys of the regions."""
        self.check()
        with translated():
            metadata = bytes(self._agent.get_agent_metadata())
        memory = not_empty(self.reachable)
        published = nixl_metadata.take_apart(metadata, self._name, self.kind, self.backend, memory)
        # Fail here rather than at the peers, which make the same check.
        nixl_metadata.check(published, self.backend, memory)
        published.board = None if self.board is None else self.board.place
        return errors.write_metadata(published)

    def _connect(self, metadata: bytes, memory: Mapping[int, Memory]) -> Link:
        """Check that a peer has registered these regions, and return a link to its agent."""
        published = errors.read_metadata(metadata, nixl_metadata.Published)
        nixl_metadata.check(published, self.backend, not_empty(memory))
        make = PairedNixlLink if self._agents.by_cpu else NixlLink
        link = make(self, self._agents, published, memory)
        self.links.add(link)
        return link

    @property
    def links(self) -> set[NixlLink]:
        """The links whose agents are neither destroyed nor retired."""
        self._made -= {one for one in list(self._made) if one.over}
        return self._made

    def _close(self) -> None:
        """Wait for operations in flight of closed links, then destroy or retire all agents."""
        deadline = time.monotonic() + _CLOSING
        while self.links and time.monotonic() < deadline:
            time.sleep(BETWEEN_LOOKS)
        for link in list(self.links):
            link.sever()
        self._agent = None
