"""Traces of real requests: what came when, and which prefixes were the same."""

from kvatlas.pool.traces.reading import read_trace
from kvatlas.pool.traces.trace import MOST_TOKENS, Ints, Trace, TraceBuilder, Unseen

__all__ = ["MOST_TOKENS", "Ints", "Trace", "TraceBuilder", "Unseen", "read_trace"]
