"""Check the endpoint that a peer announces for a push, before connecting to it."""

from __future__ import annotations

import ipaddress
import socket

from kvatlas.errors import AtlasError, Code
from kvatlas.wire.connection import split_endpoint
from kvatlas.wire.unix_sockets import unix_path


def announced_endpoint(endpoint: str, host: str, *, on_this_host: bool) -> str:
    """Return the endpoint to connect to for an announcement that came from `host`.

    A peer may only announce an endpoint at its own host, so it cannot make this node connect to
    other hosts. A wildcard address is replaced by `host`. If `on_this_host` is true, the peer runs
    on this host, and loopback and `unix://` endpoints are allowed as well.

    >>> announced_endpoint("tcp://0.0.0.0:5555", "10.0.0.7", on_this_host=False)
    'tcp://10.0.0.7:5555'
    >>> announced_endpoint("tcp://10.0.0.8:5555", "10.0.0.7", on_this_host=False)
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: The endpoint that a peer announces for a push must be at the host \
of that peer. Got endpoint tcp://10.0.0.8:5555 from a peer at host 10.0.0.7. Let the source listen \
at 0.0.0.0, or at the address from which it connects. [bad_handshake]
    """
    if unix_path(endpoint) is not None:
        if on_this_host:
            return endpoint
        raise _elsewhere(endpoint, host)
    name, port = split_endpoint(endpoint)
    caller = _address(host)
    for found in _addresses(name):
        if found.is_unspecified:
            return f"tcp://[{host}]:{port}" if caller.version == 6 else f"tcp://{caller}:{port}"
        if found == caller or (on_this_host and found.is_loopback):
            return endpoint
    raise _elsewhere(endpoint, host)


def _addresses(name: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return the addresses of a host; an empty list if its name cannot be resolved."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [_address(str(entry[4][0])) for entry in found]


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse an IP address without its IPv6 zone. An IPv4-mapped address becomes IPv4."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _elsewhere(endpoint: str, host: str) -> AtlasError:
    return AtlasError(
        Code.BAD_HANDSHAKE,
        "The endpoint that a peer announces for a push must be at the host of that peer",
        got=f"endpoint {endpoint} from a peer at host {host}",
        hint="Let the source listen at 0.0.0.0, or at the address from which it connects",
    )
