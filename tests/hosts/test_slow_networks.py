"""Networks with latency, loss or little bandwidth: every byte arrives."""

from __future__ import annotations

import pytest

from tests.hosts.conftest import MakeSite, Note
from tests.hosts.networks import BridgedNetwork, RelayedNetwork
from tests.hosts.sites import Site, Way
from tests.hosts.ways import OTHERS, TCP, over


def _arrives_in_every_way(site: Site, note: Note) -> None:
    sources, target = site.source(), site.target()
    site.connect(target, sources)
    hows = ("direct", "staged", "coalesced", "auto")
    taken = [site.arrives(target, sources, how=how, timeout=40.0).seconds for how in hows]
    site.arrives(target, sources, checksums=True, streamed=True, timeout=40.0)
    note(", ".join(f"{how} {seconds:.2f} s" for how, seconds in zip(hows, taken, strict=True)))


@over(TCP + OTHERS)
def test_a_bridge(place: MakeSite, way: Way, note: Note) -> None:
    _arrives_in_every_way(place(BridgedNetwork(2), way), note)


@over(TCP + OTHERS)
@pytest.mark.parametrize("milliseconds", [1, 10, 50])
def test_latency(place: MakeSite, way: Way, milliseconds: int, note: Note) -> None:
    network = RelayedNetwork(2)
    site = place(network, way)
    network.relay.change(delay=milliseconds / 1e3)
    _arrives_in_every_way(site, note)


@over(TCP + OTHERS)
def test_loss_of_one_percent(place: MakeSite, way: Way, note: Note) -> None:
    network = RelayedNetwork(2)
    site = place(network, way)
    network.relay.change(delay=1e-3, loss=0.01)
    _arrives_in_every_way(site, note)


@over(TCP + OTHERS)
def test_100_megabits_per_second(place: MakeSite, way: Way, note: Note) -> None:
    """The limit is the kernel's (tbf), in both directions."""
    network = BridgedNetwork(2)
    site = place(network, way)
    for host in (0, 1):
        network.limit(host, "100mbit")
    _arrives_in_every_way(site, note)
