"""A source that comes back at another address."""

from __future__ import annotations

import pytest

from tests.hosts.conftest import MakeSite, Note
from tests.hosts.networks import BridgedNetwork, Network, RelayedNetwork
from tests.hosts.sites import FAILURES, SLACK, Way
from tests.hosts.ways import TCP

SECONDS = 6.0


@pytest.mark.parametrize(("way", "made"), [(TCP[0], BridgedNetwork), (TCP[1], RelayedNetwork)])
def test_the_source_has_another_address(
    place: MakeSite, way: Way, made: type[Network], note: Note
) -> None:
    """It restarts under the same name. The old session fails, and a new one works."""
    network = made(2)
    site = place(network, way)
    sources, target = site.source(), site.target()
    site.connect(target, sources)
    site.arrives(target, sources)
    network.renumber(0, 2)
    for source in sources:
        source.kill()
    again = site.source(number=2)
    target.ask("wipe")
    request = site.offer(again)
    target.ask("pull", request, {"timeout": SECONDS})
    outcome = target.ask("end")
    note(f"{outcome.code} after {outcome.seconds:.1f} s")
    assert outcome.code in FAILURES, outcome
    assert outcome.seconds < SECONDS + SLACK
    assert site.compare(target).wrong == 0
    for source in again:
        source.ask("withdraw", request)
    site.works(target, again)
