"""Partitions in the middle of a pull: it ends by its deadline, and the next pull works."""

from __future__ import annotations

import time

import pytest

from tests.hosts.conftest import MakeSite, Note
from tests.hosts.faults import pull_to_the_middle, slow_network
from tests.hosts.member import READY
from tests.hosts.sites import Way
from tests.hosts.ways import MIXED, TCP, over

SECONDS = 10.0
"""How long the hosts are apart."""


@MIXED
def test_10_seconds_apart(place: MakeSite, way: Way, how: str, note: Note) -> None:
    """The pull resumes, or ends with a code by its deadline."""
    network = slow_network()
    site = place(network, way)
    sources, target = site.source(), site.target()
    site.connect(target, sources)
    request = pull_to_the_middle(site, target, sources, how=how, seconds=30.0)
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
    site.works(target, sources)


@over(TCP)
def test_apart_at_the_deadline(place: MakeSite, way: Way, note: Note) -> None:
    """The deadline ends the pull while the hosts are apart."""
    network = slow_network()
    site = place(network, way)
    sources, target = site.source(), site.target()
    site.connect(target, sources)
    request = pull_to_the_middle(site, target, sources, how="direct", seconds=4.0)
    network.relay.block()
    outcome = target.ask("end")
    note(f"{outcome.code} after {outcome.seconds:.1f} s")
    site.assert_failed(target, outcome, 4.0)
    network.relay.heal()
    for source in sources:
        source.ask("withdraw", request)
    site.works(target, sources)


@MIXED
@pytest.mark.parametrize("hop", [(0, 1), (1, 0)], ids=["from the source", "to the source"])
def test_one_way(
    place: MakeSite, way: Way, hop: tuple[int, int], how: str, note: Note
) -> None:
    """Packets of one direction are dropped until the pull has ended."""
    network = slow_network()
    site = place(network, way)
    sources, target = site.source(), site.target()
    site.connect(target, sources)
    request = pull_to_the_middle(site, target, sources, how=how, seconds=20.0)
    network.relay.block(hop)
    outcome = target.ask("end")
    note(f"{outcome.code} after {outcome.seconds:.1f} s")
    site.assert_failed(target, outcome, 20.0)
    network.relay.heal()
    for source in sources:
        source.ask("withdraw", request)
    site.works(target, sources)


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
    assert outcome.seconds < 3.0 * way.ranks + 2.0
    network.relay.heal()
    site.works(target, sources)
