"""A network that is slow enough to strike a pull in its middle."""

from __future__ import annotations

from typing import Any

from tests.hosts.member import Member
from tests.hosts.networks import RelayedNetwork
from tests.hosts.sites import Site, until

MIDDLE = 400_000
"""Bytes from a source after which a pull counts as in its middle: a fifth of the request."""


def slow_network(hosts: int = 2, **given: Any) -> RelayedNetwork:
    """Hosts with 2 ms between them that send 8 Mbit/s: a request takes two seconds."""
    network = RelayedNetwork(hosts, **given)
    network.relay.change(delay=2e-3)
    for host in range(hosts):
        network.limit(host, "8mbit")
    return network


def pull_to_the_middle(
    site: Site, target: Member, sources: list[Member], hop: tuple[int, int] = (0, 1), **about: Any
) -> str:
    """Start a pull, and return its request once a part of its bytes has passed the relay."""
    network = site.network
    assert isinstance(network, RelayedNetwork)
    before = network.relay.forwarded(hop)
    request = site.pull(target, sources, **about)
    until(lambda: network.relay.forwarded(hop) > before + MIDDLE)
    return request
