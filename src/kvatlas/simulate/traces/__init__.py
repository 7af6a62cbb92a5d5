"""Traces of real requests: their arrival times and their shared prefixes."""

from kvatlas.simulate.traces.reading import read_trace
from kvatlas.simulate.traces.trace import MOST_TOKENS, Ints, Trace, Unseen
from kvatlas.simulate.traces.trace_builder import TraceBuilder, TraceRequest

__all__ = ["MOST_TOKENS", "Ints", "Trace", "TraceBuilder", "TraceRequest", "Unseen", "read_trace"]
