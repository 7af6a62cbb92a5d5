"""The server end: a node, its offers and expectations, and the leases it grants."""

from kvatlas.wire.server.node import Node, pools_for

__all__ = ["Node", "pools_for"]
