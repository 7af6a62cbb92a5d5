"""Open the transport of two engines on this host, and report what peers would see of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from kvatlas.engines.vllm.engine_pair import Ends, Finding, Verdict, finding
from kvatlas.engines.vllm.settings import AUTO, ConnectorSettings
from kvatlas.engines.vllm.transport_choice import TransportChoice, choose_transport
from kvatlas.errors import AtlasError
from kvatlas.wire import Transport, make_transport


def opened_transport_finding(ends: Ends, names: Sequence[str]) -> Finding:
    """Return a finding about the transport of both engines, opened with each engine's options."""
    said, found = list[str](), list[tuple[Verdict, str]]()
    for end, name in zip(ends, names, strict=True):
        assert end.settings is not None  # noqa: S101
        chosen = choose_transport(end.settings, on_gpu=False)
        said.append(f"{AUTO} ({chosen.name})" if name == AUTO else name)
        found.append(_opened(chosen, end.settings))
    order: Sequence[Verdict] = ("no", "look", "ok")
    verdict, why = min(found, key=lambda one: order.index(one[0]))
    return finding("transport", said, verdict, why)


def _opened(chosen: TransportChoice, settings: ConnectorSettings) -> tuple[Verdict, str]:
    """Open a transport as the engine would, and return a verdict with its reason."""
    try:
        with closing(make_transport(chosen.name, **chosen.options)) as transport:
            return _looked_at(transport, settings)
    except AtlasError as refusal:
        return "look", f"not available on this host: {refusal.got}. {refusal.hint}"


def _looked_at(transport: Transport, settings: ConnectorSettings) -> tuple[Verdict, str]:
    """Compare an open transport with the address at which the engine promises to be reached."""
    if settings.local:
        return "ok", "available on this host"
    if not transport.beyond_host:
        return "no", f"{transport.name} is open on loopback only: set its address or device"
    if not transport.guarantees.authentication and not settings.unprotected:
        return "no", f"{transport.name} does not authenticate peers: use tcp, or set unprotected"
    missing = transport.guarantees.missing
    if missing:
        return "look", f"{transport.name} provides no {', '.join(missing)}"
    return "ok", "available on this host; encrypted and authenticated"
