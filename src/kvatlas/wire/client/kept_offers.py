"""Keep a peer's offers from expiring while a session with the peer is being opened.

Opening a session may take longer than an offer lasts, because a transport registers memory or the
machine is busy. So the reader sends `Keep` messages in the meantime. Without such messages, the
source would learn of the reader only when the first pull asks for a lease.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvatlas.errors import AtlasError, Code
from kvatlas.wire.protocol import Keep
from kvatlas.wire.rpc import log
from kvatlas.wire.server.node_state import NodeState

_ANSWER_SECONDS = 5.0
_SOONEST, _LATEST = 0.2, 5.0
"""Seconds between two messages: half of the time for which the source keeps the offer, within
these bounds."""


@contextmanager
def kept_offer(
    node: NodeState, endpoints: Sequence[str], request: str, seconds: float
) -> Iterator[None]:
    """A context that keeps the offers of one request from expiring, for at most `seconds`.

    The source at each endpoint gets a message at intervals. A source that cannot be reached, or
    that does not support the message, gets no further message; its offer then expires as usual.
    """
    over = threading.Event()
    until = time.monotonic() + seconds

    def keep(endpoint: str) -> None:
        while not over.is_set() and (left := until - time.monotonic()) > 0:
            question = Keep(request=request, seconds=left)
            try:
                deadline = time.monotonic() + _ANSWER_SECONDS
                answer = node.channels.ask(endpoint, question, deadline=deadline)
            except AtlasError as refused:
                if refused.code is not Code.UNKNOWN_REQUEST:
                    log.debug("not kept request=%r code=%s", request, refused.code)
                    return
                pause = _SOONEST  # it may be offered soon
            else:
                pause = min(_LATEST, max(_SOONEST, getattr(answer, "seconds", 0.0) / 2))
            over.wait(pause)

    threads = [
        threading.Thread(target=keep, args=(one,), name="kvatlas-keep", daemon=True)
        for one in endpoints
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
