"""Connect to a running engine as its peers do, and report what a peer would see."""

from __future__ import annotations

import socket
import time
from contextlib import closing

from kvatlas.engines.vllm.engine_pair import Finding, Verdict
from kvatlas.engines.vllm.settings import ConnectorSettings
from kvatlas.errors import AtlasError, Code
from kvatlas.wire import Security
from kvatlas.wire.channels import Channels
from kvatlas.wire.connection import split_endpoint
from kvatlas.wire.protocol import Keep

_SECONDS = 5.0
_ANSWERED = (Code.UNKNOWN_REQUEST, Code.BAD_HANDSHAKE)
"""Refusals of a question about a request that does not exist. Versions before `Keep` send the
second one."""


def peer_finding(settings: ConnectorSettings, peer: str) -> Finding:
    """Connect to a running rank of a peer engine, and return a finding.

    `peer` is the rank's address and port. `settings` are the settings of the engine that would
    connect, and contain its secret. The function sends one request to the rank, to detect a wrong
    secret or another program on the port.
    """
    endpoint = peer if peer.startswith("tcp://") else f"tcp://{peer}"
    verdict, seen, why = _connect(settings, endpoint)
    return Finding("peer", seen, endpoint.removeprefix("tcp://"), verdict, why)


def _connect(settings: ConnectorSettings, endpoint: str) -> tuple[Verdict, str, str]:
    """Return (verdict, the address that the peer sees, reason)."""
    seen = "-"
    try:
        host, port = split_endpoint(endpoint)
        begun = time.monotonic()
        with socket.create_connection((host, port), timeout=_SECONDS) as probe:
            seen = str(probe.getsockname()[0])
        milliseconds = 1e3 * (time.monotonic() - begun)
        secret = settings.secret()
        with closing(Channels(Security(secret))) as channels:
            question = Keep(request="kvatlas doctor", seconds=1.0)
            channels.ask(endpoint, question, deadline=time.monotonic() + _SECONDS)
    except OSError as problem:
        return "no", seen, f"not reached: {problem.strerror or problem}"
    except AtlasError as refusal:
        if refusal.code not in _ANSWERED:
            return "no", seen, f"{refusal.problem}: {refusal.got}. {refusal.hint}"
    if secret is None:
        return (
            "look",
            seen,
            f"reached in {milliseconds:.1f} ms; neither encrypted nor authenticated",
        )
    return "ok", seen, f"reached in {milliseconds:.1f} ms; encrypted and authenticated"
