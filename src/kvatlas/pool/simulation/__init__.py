"""Hit rates: a trace's requests through the pools of a plan."""

from kvatlas.pool.simulation.layer_classes import LayerClass, PoolModel
from kvatlas.pool.simulation.replay import Outcome, Replay, ReplayPolicy
from kvatlas.pool.simulation.spans import Spans

__all__ = ["LayerClass", "Outcome", "PoolModel", "Replay", "ReplayPolicy", "Spans"]
