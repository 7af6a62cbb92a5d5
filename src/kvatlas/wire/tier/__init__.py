"""The host and disk tier: what one topology stored, another can load."""

from kvatlas.wire.tier.books import Stored
from kvatlas.wire.tier.held import Held
from kvatlas.wire.tier.tier import Tier

__all__ = ["Held", "Stored", "Tier"]
