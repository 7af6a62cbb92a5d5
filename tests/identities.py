"""The identity that nodes of tests share unless a test is about identities."""

from kvatlas.models import CacheIdentity

OURS = CacheIdentity(weights="the weights of the tests")
