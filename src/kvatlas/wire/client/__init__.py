"""The end that asks: a session with peers, and the transfers it carries out."""

from kvatlas.wire.client.session import Session
from kvatlas.wire.client.transfer import Transfer

__all__ = ["Session", "Transfer"]
