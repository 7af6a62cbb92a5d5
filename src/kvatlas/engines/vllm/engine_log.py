"""Show the connector's messages in the log of the engine.

vLLM configures only its own logger. Without this module, Python would drop the connector's messages
of level INFO, such as the transport that `auto` selects, and print others without time and process.
"""

from __future__ import annotations

import logging

CONNECTOR = "kvatlas.vllm"
"""The name of the connector's logger."""


def join_engine_log() -> None:
    """Pass kvatlas's log messages to vLLM's log handlers, unless the application handles them.

    The connector's logger gets the level of vLLM's logger, but always shows warnings. The loggers
    of kvatlas's transports, which log each connection and lease at INFO, show only warnings.
    """
    ours, engine = logging.getLogger("kvatlas"), logging.getLogger("vllm")
    if ours.hasHandlers():
        return
    for handler in engine.handlers:
        ours.addHandler(handler)
    logging.getLogger(CONNECTOR).setLevel(min(engine.getEffectiveLevel(), logging.WARNING))
