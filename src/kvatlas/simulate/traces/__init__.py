"""Traces of real requests: their arrival times and their shared prefixes."""

from kvatlas.simulate.traces.reading import read_trace
from kvatlas.simulate.traces.trace import MOST_TOKENS, Ints, Trace, TraceBuilder, Unseen

__all__ = ["MOST_TOKENS", "Ints", "Trace", "TraceBuilder", "Unseen", "read_trace"]
