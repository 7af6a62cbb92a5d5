"""The client end: a session with peers, and the transfers that it runs."""

from kvatlas.wire.client.session import Session
from kvatlas.wire.client.transfer import Transfer

__all__ = ["Session", "Transfer"]
