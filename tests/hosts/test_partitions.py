"""Partitions in the middle of a pull: it ends by its deadline, and the next pull works."""

from __future__ import annotations

import time

import pytest

from tests.hosts.conftest import MakeSite, Note
from tests.hosts.faults import pull_to_the_middle, slow_network
from tests.hosts.member import READY
from tests.hosts.networks import RelayedNetwork
from tests.hosts.sites import FAILURES, SLACK, Way
from tests.hosts.ways import TCP, over, struck

SECONDS = 10.0
"""How long the hosts are apart."""


@struck()
def test_10_seconds_apart(place: MakeSite, way: Way, how: str, note: Note) -> None:
    """The pull resumes, or ends with a code by its deadline."""
    network = slow_network()
    site = place(network, way)
    sources, target = site.source(), site.target()
    site.connect(target, sources)
    request = pull_to_the_middle(site, target, sources, how=how, timeout=30.0)
    network.relay.block()
    time.sleep(SECONDS)
    network.relay.heal()
    outcome = target.ask("end")
    note(f"{outcome.code} after {outcome.seconds:.1f} s")
    if outcome.code == READY:
        site.assert_arrived(target, sources)
    else:
        site.assert_failed(target, outcome, 30.0)
        for source in sources:
            source.ask("withdraw", request)
    site.arrives(target, sources)  # over the same session
    site.works(target, sources)


@over(TCP)
def test_apart_at_the_deadline(place: MakeSite, way: Way, note: Note) -> None:
    """The deadline ends the pull while the hosts are apart."""
    network = slow_network()
    site = place(network, way)
    sources, target = site.source(), site.target()
    site.connect(target, sources)
    request = pull_to_the_middle(site, target, sources, how="direct", timeout=4.0)
    network.relay.block()
    outcome = target.ask("end")
    note(f"{outcome.code} after {outcome.seconds:.1f} s")
    site.assert_failed(target, outcome, 4.0)
    network.relay.heal()
    for source in sources:
        source.ask("withdraw", request)
    site.arrives(target, sources)  # over the same session
    site.works(target, sources)


@struck("tcp")
@pytest.mark.parametrize("lost", ["from the source", "to the source"])
def test_one_way(place: MakeSite, way: Way, lost: str, how: str, note: Note) -> None:
    """Packets of one direction are dropped until the pull has ended."""
    network = slow_network()
    site = place(network, way)
    sources, target = site.source(), site.target()
    site.connect(target, sources)
    request = pull_to_the_middle(site, target, sources, how=how, timeout=20.0)
    network.relay.block((0, 1) if lost == "from the source" else (1, 0))
    outcome = target.ask("end")
    note(f"{outcome.code} after {outcome.seconds:.1f} s")
    site.assert_failed(target, outcome, 20.0)
    network.relay.heal()
    for source in sources:
        source.ask("withdraw", request)
    site.works(target, sources)


@over(TCP)
def test_closed_while_apart(place: MakeSite, way: Way, note: Note) -> None:
    """A session and a node close without waiting for a peer that does not answer."""
    network = slow_network()
    site = place(network, way)
    sources, target = site.source(), site.target()
    site.connect(target, sources)
    pull_to_the_middle(site, target, sources, how="direct", timeout=30.0)
    network.relay.block()
    begun = time.monotonic()
    target.ask("close")
    seconds = time.monotonic() - begun
    note(f"closed after {seconds:.1f} s")
    assert seconds < SLACK


@over(TCP)
def test_apart_while_a_session_opens(place: MakeSite, way: Way, note: Note) -> None:
    """A session that cannot connect ends in its own time."""
    network = slow_network()
    site = place(network, way)
    sources, target = site.source(), site.target()
    network.relay.block((0, 1))
    outcome = target.ask("connect", [one.endpoint for one in sources], 3.0)
    note(f"{outcome.code} after {outcome.seconds:.1f} s")
    assert outcome.code == "deadline"
    assert outcome.seconds < 4.0
    network.relay.heal()
    site.works(target, sources)


@over(TCP[:1])
def test_apart_after_a_slow_connect(place: MakeSite, way: Way, note: Note) -> None:
    """Connecting and the TLS handshake share one deadline."""
    network = RelayedNetwork(2)
    site = place(network, way)
    sources, target = site.source(), site.target()
    # The small packets of a TCP connect pass after a second; those of a handshake never do.
    network.relay.change(delay=1.0, mtu=120)
    outcome = target.ask("connect", [one.endpoint for one in sources], 3.0)
    note(f"{outcome.code} after {outcome.seconds:.1f} s")
    assert outcome.code == "deadline"
    assert outcome.seconds < 4.0
    network.relay.change(delay=0.0, mtu=1500)
    site.works(target, sources)


@over(TCP)
def test_a_firewall_drops_the_data_port(place: MakeSite, way: Way, note: Note) -> None:
    """Messages arrive and data does not: the session ends in time, and names the cause."""
    network = RelayedNetwork(2)
    site = place(network, way)
    sources, target = site.source(), site.target()
    ports = tuple(int(one.endpoint.rpartition(":")[2]) for one in sources)
    network.relay.change(ports=ports)
    outcome = target.ask("connect", [one.endpoint for one in sources], 3.0)
    note(f"{outcome.code} after {outcome.seconds:.1f} s")
    assert outcome.code in FAILURES, outcome
    assert outcome.seconds < 4.0
    assert site.network.address(0) in outcome.message
    network.relay.change(ports=())
    site.works(target, sources)
