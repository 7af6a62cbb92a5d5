"""Hosts that vanish: no packet says so. Keepalive notices, and what they held is freed."""

from __future__ import annotations

from tests.hosts.conftest import MakeSite, Note
from tests.hosts.faults import pull_to_the_middle, slow_network
from tests.hosts.networks import BridgedNetwork
from tests.hosts.sites import FREED, NOTICED, SLACK, Way, left, until
from tests.hosts.ways import TCP, over, struck


@struck()
def test_the_source_vanishes(place: MakeSite, way: Way, how: str, note: Note) -> None:
    """Its reader notices long before the pull's deadline, and reads from its successor."""
    network = slow_network()
    site = place(network, way)
    sources, target = site.source(), site.target()
    site.connect(target, sources)
    pull_to_the_middle(site, target, sources, how=how, timeout=50.0)
    network.relay.isolate(0)
    for source in sources:
        source.kill()
    outcome = target.ask("end")
    note(f"{outcome.code} after {outcome.seconds:.1f} s")
    site.assert_failed(target, outcome, NOTICED + 1.0)
    network.relay.heal()
    site.works(target, site.source())


@struck()
def test_the_destination_vanishes(place: MakeSite, way: Way, how: str, note: Note) -> None:
    """The source frees the lease, and keeps the offer for another reader."""
    network = slow_network()
    site = place(network, way)
    sources, target = site.source(), site.target()
    site.connect(target, sources)
    request = pull_to_the_middle(site, target, sources, how=how, timeout=50.0)
    assert any(source.ask("left")["leases"] for source in sources)
    network.relay.isolate(1)
    target.kill()
    freed = until(lambda: not any(left(*sources)), FREED + SLACK)
    note(f"lease freed after {freed:.1f} s")
    assert [source.ask("released_offers") for source in sources] == [[]] * len(sources)
    network.relay.heal()
    again = site.target(name="successor")
    site.connect(again, sources)
    again.ask("pull", request, {"timeout": 20.0})
    outcome = again.ask("end")
    assert outcome.code == "ready", outcome
    site.assert_arrived(again, sources)
    site.works(again, sources)


@over(TCP)
def test_a_device_goes_down(place: MakeSite, way: Way, note: Note) -> None:
    """The device of the source is down during the pull, and up again afterwards."""
    network = BridgedNetwork(2)
    site = place(network, way)
    network.limit(0, "8mbit")
    sources, target = site.source(), site.target()
    site.connect(target, sources)
    request = site.pull(target, sources, how="direct", timeout=50.0)
    until(lambda: target.ask("moved") > 0)
    network.set_up(0, up=False)
    outcome = target.ask("end")
    note(f"{outcome.code} after {outcome.seconds:.1f} s")
    site.assert_failed(target, outcome, NOTICED + 1.0)
    network.set_up(0, up=True)
    for source in sources:
        source.ask("withdraw", request)
    site.works(target, sources)
