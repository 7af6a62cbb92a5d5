"""Wires: bytes moved along routes, by transports that people run.

A `Node` puts one rank's caches on the wire, a `Session` connects it to its peers, and a
`Transfer` is one request on its way.
"""

from kvatlas.wire.client.rank_transfer import How
from kvatlas.wire.client.session import Session
from kvatlas.wire.client.transfer import Transfer
from kvatlas.wire.local_copy import carry
from kvatlas.wire.memory_copy import as_bytes
from kvatlas.wire.metrics import Metrics
from kvatlas.wire.peers import refuse_large
from kvatlas.wire.sample_server import Task, memory_of, noise, served
from kvatlas.wire.server.node import Node, pools_for
from kvatlas.wire.staging import Bytes, stream_bytes
from kvatlas.wire.transports.base import Handle, Link, Memory, Transport
from kvatlas.wire.transports.registry import NAMES, make

__all__ = [
    "NAMES",
    "Bytes",
    "Handle",
    "How",
    "Link",
    "Memory",
    "Metrics",
    "Node",
    "Session",
    "Task",
    "Transfer",
    "Transport",
    "as_bytes",
    "carry",
    "make",
    "memory_of",
    "noise",
    "pools_for",
    "refuse_large",
    "served",
    "stream_bytes",
]
