"""The host and disk tier: what one topology stored, another can load."""

from kvatlas.tier.index import Stored
from kvatlas.tier.lookup import Held
from kvatlas.tier.tier import Tier

__all__ = ["Held", "Stored", "Tier"]
