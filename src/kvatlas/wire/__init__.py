"""Wires: bytes moved along routes, by transports that people run.

A `Node` puts one rank's caches on the wire, a `Session` connects it to its peers, and a
`Transfer` is one request on its way.
"""

from kvatlas.wire.client.session import Session
from kvatlas.wire.client.transfer import Transfer
from kvatlas.wire.metrics import Metrics
from kvatlas.wire.server.node import Node
from kvatlas.wire.transports.base import Handle, Link, Memory, Transport

__all__ = ["Handle", "Link", "Memory", "Metrics", "Node", "Session", "Transfer", "Transport"]
