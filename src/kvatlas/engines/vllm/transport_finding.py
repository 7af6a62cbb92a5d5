"""Open the transport of each engine that runs on this host, and report the results."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from contextlib import closing

from kvatlas.engines.vllm.engine_pair import Ends, Finding, Verdict, finding
from kvatlas.engines.vllm.settings import AUTO, ConnectorSettings
from kvatlas.engines.vllm.transport_choice import TransportChoice, choose_transport
from kvatlas.errors import AtlasError, Code
from kvatlas.wire import Security, Transport, make_transport

_OTHER_ENVIRONMENT = (Code.MISSING_EXTRA, Code.WRONG_DEVICE)
"""Engines on loopback may run on another host, with libraries or GPUs that this one lacks."""


def opened_transport_findings(ends: Ends, names: Sequence[str]) -> list[Finding]:
    """Open each engine's transport with the engine's options, and return findings.

    The first finding reports whether the transports open. The second one contains, for each engine,
    the address that peers see and the protection of the bytes. An engine is skipped if its address
    is not an address of this host.
    """
    said, found, unchecked = list(names), list[tuple[Verdict, str]](), list[str]()
    seen = ["-", "-"]
    for number, (end, name) in enumerate(zip(ends, names, strict=True)):
        assert end.settings is not None  # noqa: S101
        address = end.settings.own_address
        if not on_this_host(address):
            unchecked.append(address)
            continue
        chosen = choose_transport(end.settings, on_gpu=False)
        said[number] = f"{AUTO} ({chosen.name})" if name == AUTO else name
        verdict, why, seen[number] = _opened(chosen, end.settings)
        found.append((verdict, why))
    if not found:
        why = "neither address is of this host: run doctor on the host of each engine"
        return [finding("transport", said, "look", why)]
    order: Sequence[Verdict] = ("no", "look", "ok")
    verdict, why = min(found, key=lambda one: order.index(one[0]))
    skipped = [f"{address} is not an address of this host: not checked" for address in unchecked]
    return [
        finding("transport", said, verdict, "; ".join((why, *skipped))),
        finding("peers see", seen),
    ]


def tls_refusal() -> str:
    """Return the reason why secrets cannot be used in this environment; empty if they can."""
    try:
        Security(bytes(16))
    except AtlasError as refusal:
        return f"{refusal.problem}, and a secret needs it. {refusal.hint}"
    return ""


def on_this_host(address: str) -> bool:
    """Return whether `address`, an IP address or a host name, belongs to this host."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(where)
    except OSError as problem:
        resolved = not isinstance(problem, socket.gaierror)
        return resolved and problem.errno != errno.EADDRNOTAVAIL
    return True


def _opened(chosen: TransportChoice, settings: ConnectorSettings) -> tuple[Verdict, str, str]:
    """Open a transport as the engine would. Return (verdict, its reason, what peers see)."""
    try:
        with closing(make_transport(chosen.name, **chosen.options)) as transport:
            return *_looked_at(transport, settings), _seen(transport, settings)
    except AtlasError as refusal:
        if settings.local and refusal.code in _OTHER_ENVIRONMENT:
            return "look", f"not available on this host: {refusal.got}. {refusal.hint}", "-"
        return "no", f"{refusal.problem}: {refusal.got}. {refusal.hint}", "-"


def _seen(transport: Transport, settings: ConnectorSettings) -> str:
    """Return where peers reach an open transport, and what protects its bytes."""
    where = transport.beyond_host or "this host only"
    guarantees = transport.guarantees
    given = {
        "encrypted": guarantees.confidentiality and settings.secret_file is not None,
        "authenticated": guarantees.authentication and settings.secret_file is not None,
    }
    if settings.local:
        return f"{transport.name}, {where}"
    return f"{transport.name} at {where}, " + ", ".join(
        word if true else f"not {word}" for word, true in given.items()
    )


def _looked_at(transport: Transport, settings: ConnectorSettings) -> tuple[Verdict, str]:
    """Check whether an open transport can be reached at the address that the engine advertises."""
    if settings.local:
        return "ok", "available on this host"
    if not transport.beyond_host:
        return "no", f"{transport.name} is open on loopback only: set its address or device"
    if not transport.guarantees.authentication and not settings.unprotected:
        return "no", f"{transport.name} does not authenticate peers: use tcp, or set unprotected"
    missing = transport.guarantees.missing
    if missing:
        return "look", f"{transport.name} provides no {', '.join(missing)}"
    if settings.secret_file is None:
        return "look", "neither encrypted nor authenticated without a secret"
    if unprotected := tls_refusal():
        return "no", unprotected
    return "ok", "available on this host; encrypted and authenticated"
