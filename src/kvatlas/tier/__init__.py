"""The host and disk tier: what one topology stored, another can fetch."""

from kvatlas.tier.file_owner import socket_beside
from kvatlas.tier.hit import Hit
from kvatlas.tier.index import StoreResult
from kvatlas.tier.served.client import TierClient
from kvatlas.tier.served.server import TierServer
from kvatlas.tier.served.sharing import share_file, share_memory
from kvatlas.tier.tier import Tier

__all__ = [
    "Hit",
    "StoreResult",
    "Tier",
    "TierClient",
    "TierServer",
    "share_file",
    "share_memory",
    "socket_beside",
]
