"""The end that answers: a node, what it offers and expects, and the leases it grants."""

from kvatlas.wire.server.node import Node, pools_for

__all__ = ["Node", "pools_for"]
