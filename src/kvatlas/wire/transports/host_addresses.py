"""The addresses of a host name, and whether other hosts can connect to them."""

from __future__ import annotations

import ipaddress
import socket

from kvatlas.wire.transports import errors


def own_addresses(host: str) -> list[str]:
    """Return the addresses that a host name resolves to. Raise an error for wildcard addresses.

    >>> own_addresses("127.0.0.1")
    ['127.0.0.1']
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as problem:
        got = f"host={host!r}: {problem}"
        hint = "Pass an IP address or a host name of this machine"
        raise errors.failed(got, hint, "The host name cannot be resolved") from problem
    addresses = sorted({str(entry[4][0]) for entry in found})
    if any(ipaddress.ip_address(address).is_unspecified for address in addresses):
        hint = "Pass the address that peers connect to"
        raise errors.failed(f"host={host!r}", hint, "The host must not be a wildcard address")
    return addresses


def is_loopback(address: str) -> bool:
    """Whether an address is a loopback address, which only this host can connect to.

    >>> is_loopback("127.0.0.2"), is_loopback("::1"), is_loopback("fe80::1%eth0")
    (True, True, False)
    """
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
