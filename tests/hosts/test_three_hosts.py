"""Three hosts: replicas that take over, and traffic that a fault of others does not touch."""

from __future__ import annotations

from tests.hosts.conftest import MakeSite, Note
from tests.hosts.faults import MIDDLE, pull_to_the_middle, slow_network
from tests.hosts.member import READY, Compared, Member
from tests.hosts.networks import RelayedNetwork
from tests.hosts.sites import FAILURES, SLACK, Site, Way, until
from tests.hosts.ways import TCP, over, struck


@struck()
def test_another_replica_takes_over(place: MakeSite, way: Way, how: str, note: Note) -> None:
    """The replica that a pull reads from vanishes; the pull arrives from the other one."""
    network = slow_network(3)
    site = place(network, way)
    first, second = site.source(0, name="first"), site.source(1, name="second")
    target = site.target(2)
    site.connect(target, first + second)
    pull_to_the_middle(site, target, first + second, hop=(0, 2), how=how, timeout=40.0)
    network.relay.isolate(0)
    for member in first:
        member.kill()
    outcome = target.ask("end")
    note(f"{outcome.code} after {outcome.seconds:.1f} s")
    assert outcome.code == READY, outcome
    site.assert_arrived(target, second)
    site.works(target, second)


@over(TCP)
def test_a_third_host_pulls_during_a_partition(place: MakeSite, way: Way, note: Note) -> None:
    """Host 0 pushes to host 1 and loses it; host 2 pulls from host 0 as if nothing had happened."""
    network = slow_network(3)
    site = place(network, way)
    sources, lost, puller = site.source(0), site.target(1, name="lost"), site.target(2)
    site.connect(puller, sources)
    site.expect_push(lost)
    for source in sources:
        site.connect(source, [lost])
        source.ask("push", "pushed", {"timeout": 12.0})
    until(lambda: network.relay.forwarded((0, 1)) > MIDDLE)
    network.relay.isolate(1)
    taken = []
    for _ in range(3):
        site.pull(puller, sources, how="direct", timeout=20.0)
        outcome = puller.ask("end")
        assert outcome.code == READY, outcome
        assert site.compare(puller) == Compared(missing=0, wrong=0)
        taken.append(outcome.seconds)
    pushes = [source.ask("end") for source in sources]
    note(f"{pushes[0].code} after {pushes[0].seconds:.1f} s; pulls {max(taken):.1f} s")
    assert max(taken) < 6.0
    assert {push.code for push in pushes} <= set(FAILURES), pushes
    assert max(push.seconds for push in pushes) < 12.0 + SLACK
    assert not lost.ask("pushed", 0.0)
    network.relay.heal()
    lost.ask("forget", "pushed")
    _push_arrives(site, sources, lost)


@over(TCP)
def test_a_push_arrives(place: MakeSite, way: Way) -> None:
    network = RelayedNetwork(2)
    site = place(network, way)
    network.relay.change(delay=10e-3)
    _push_arrives(site, site.source(), site.target())


def _push_arrives(site: Site, sources: list[Member], target: Member) -> None:
    target.ask("wipe")
    site.expect_push(target)
    for source in sources:
        site.connect(source, [target])
        source.ask("push", "pushed", {"timeout": 30.0})
    assert [source.ask("end").code for source in sources] == [READY] * len(sources)
    assert target.ask("pushed", 5.0)
    target.ask("forget", "pushed")
    site.assert_arrived(target, sources)
