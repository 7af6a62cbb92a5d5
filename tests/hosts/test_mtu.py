"""Hosts and paths with unlike MTUs. The relay drops packets that are too large without ICMP."""

from __future__ import annotations

import pytest

from tests.hosts.conftest import MakeSite, Note
from tests.hosts.networks import RelayedNetwork
from tests.hosts.sites import Way
from tests.hosts.ways import OTHERS, TCP, over

SECONDS = 6.0


@over(TCP + OTHERS)
@pytest.mark.parametrize("mtu", ["9000 and 1500", "1280 and 9000"])
def test_hosts_with_unlike_mtus(place: MakeSite, way: Way, mtu: str) -> None:
    """TCP agrees on the smaller one."""
    source, destination = map(int, mtu.split(" and "))
    site = place(RelayedNetwork(2, mtu=(source, destination)), way)
    sources, target = site.source(), site.target()
    site.connect(target, sources)
    for how in ("direct", "staged"):
        site.arrives(target, sources, how=how)


@over(TCP)
@pytest.mark.parametrize(("mtu", "path"), [(1500, 1280), (9000, 1500)])
def test_a_path_that_drops_large_packets(
    place: MakeSite, way: Way, mtu: int, path: int, note: Note
) -> None:
    """A pull ends by its deadline with a code, and works once the path carries the packets."""
    network = RelayedNetwork(2, mtu=(mtu, mtu))
    site = place(network, way)
    sources, target = site.source(), site.target()
    site.connect(target, sources)
    network.relay.change(mtu=path)
    request = site.pull(target, sources, how="direct", timeout=SECONDS)
    outcome = target.ask("end")
    note(f"{outcome.code} after {outcome.seconds:.1f} s")
    site.assert_failed(target, outcome, SECONDS)
    connected = target.ask("connect", [one.endpoint for one in sources], SECONDS)
    assert connected.code == "deadline", connected
    network.relay.change(mtu=mtu)
    for source in sources:
        source.ask("withdraw", request)
    site.works(target, sources)


@over(TCP)
def test_a_path_whose_mtu_is_searched(place: MakeSite, way: Way) -> None:
    """Where the kernel searches for the MTU, the pull arrives."""
    network = RelayedNetwork(2)
    site = place(network, way)
    network.relay.change(mtu=1280)
    for host in (0, 1):
        network.probe_mtu(host)
    sources, target = site.source(), site.target()
    site.connect(target, sources)
    site.arrives(target, sources)
