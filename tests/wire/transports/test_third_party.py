"""A transport from another package: found by its entry point, and used like any other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvatlas import AtlasError
from kvatlas.routing import scattered
from kvatlas.wire import Node, Session, make_transport, pools_for
from kvatlas.wire.transports import registry
from tests.identities import OURS
from tests.wire.helpers import small

MODULE = """
from kvatlas.wire.transports.memory import MemoryTransport

class PigeonTransport(MemoryTransport):
    name = "pigeon"

not_a_transport = 3
"""
POINTS = """
[kvatlas.transports]
pigeon = pigeons:PigeonTransport
sparrow = pigeons:not_a_transport
tcp = pigeons:PigeonTransport
"""


@pytest.fixture
def pigeons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with three entry points."""
    (tmp_path / "pigeons.py").write_text(MODULE)
    about = tmp_path / "pigeons-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: pigeons\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._entry_points.cache_clear()
    yield
    registry._entry_points.cache_clear()


@pytest.mark.usefixtures("pigeons")
def test_a_transport_of_another_package_moves_a_request() -> None:
    plan = small("dense")
    ends = [make_transport("pigeon") for _ in range(2)]
    pools = [pools_for(plan, 0, end) for end in ends]
    for number, byte in enumerate((7, 0)):
        for pool in pools[number].values():
            pool[:] = byte
    nodes = [
        Node(plan, memory=own, transport=end, identity=OURS)
        for own, end in zip(pools, ends, strict=True)
    ]
    with nodes[0] as source, nodes[1] as target:
        blocks = scattered(plan, 32)
        source.offer("request", blocks, 32)
        with Session(target, [source.endpoint]) as session:
            assert session.pull("request", destination_blocks=blocks, tokens=32).wait(10).ready
    assert source.transport.name == "pigeon"
    assert any((pool == 7).any() for pool in pools[1].values())


@pytest.mark.usefixtures("pigeons")
def test_an_entry_point_must_be_a_transport_and_takes_no_name_of_kvatlas() -> None:
    with pytest.raises(AtlasError, match="not a transport"):
        make_transport("sparrow")
    with pytest.raises(AtlasError, match="pigeon, sparrow"):
        make_transport("ostrich")
    assert type(make_transport("tcp")).__name__ == "TcpTransport"
