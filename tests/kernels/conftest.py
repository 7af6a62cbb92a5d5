"""Pools of all tests here are guarded."""

from tests.guards import guarded_pools

__all__ = ["guarded_pools"]
