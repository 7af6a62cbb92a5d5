"""The host and disk tier: what one topology stored, another can fetch."""

from kvatlas.tier.hit import Hit
from kvatlas.tier.index import StoreResult
from kvatlas.tier.tier import Tier

__all__ = ["Hit", "StoreResult", "Tier"]
