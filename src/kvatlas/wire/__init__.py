"""Move KV caches between processes and hosts, over CUDA IPC, NIXL, TCP and other transports.

A `Node` serves one rank's caches, a `Session` connects a node to its peers, and a `Transfer` tracks
one request while it moves.
"""

from kvatlas.copying import HOST, Memory, memory_of
from kvatlas.wire.client import Session, Transfer
from kvatlas.wire.metrics import Metrics
from kvatlas.wire.protocol import How
from kvatlas.wire.security import PeerAccess, Security, TlsContexts
from kvatlas.wire.server.node import Node, pools_for
from kvatlas.wire.transports.base import Link, Transport
from kvatlas.wire.transports.handles import Handle
from kvatlas.wire.transports.registry import TRANSPORT_NAMES, make_transport

__all__ = [
    "HOST",
    "TRANSPORT_NAMES",
    "Handle",
    "How",
    "Link",
    "Memory",
    "Metrics",
    "Node",
    "PeerAccess",
    "Security",
    "Session",
    "TlsContexts",
    "Transfer",
    "Transport",
    "make_transport",
    "memory_of",
    "pools_for",
]
