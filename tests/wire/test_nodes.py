"""What a node gives back, and leaves alone, when it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from kvatlas import AtlasError
from kvatlas.errors import Code
from kvatlas.wire import Memory, Node, Session
from tests.wire.helpers import Buffers, End, Local, ends, pull_all, small


def test_a_lease_that_is_refused_gives_its_staging_buffers_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = End(small("dense"), 32, seed=1)
    target = End(small("dense", layout="LBHNC"), 32, seed=2)
    with ends(source, target):
        source.offer("r")
        with monkeypatch.context() as patch:
            patch.setattr("kvatlas.wire.leases._MAX_LEASES", 0)
            with Session(target.nodes[0], source.endpoints) as session:
                for _ in range(5):  # more often than there are buffers
                    with pytest.raises(AtlasError) as refusal:
                        session.pull("r", dst_blocks=target.blocks, tokens=32, how="staged").wait(9)
                    assert refusal.value.code is Code.TOO_MANY
        source.assert_idle()
        pull_all(source, target, "r", how="staged")


def test_bad_arguments_do_not_close_the_callers_transport() -> None:
    made = small("dense", tp=2)
    good = Buffers(made, 0).memory
    index, at = next(iter(good.items()))
    wrong: list[dict[str, Any]] = [
        {"rank": 2},
        {"rank": -1},
        {"memory": {}},
        {"memory": {index: Memory(at.address, at.nbytes - 1)}},
        {"memory": {index: Memory(at.address + 1, at.nbytes)}},
        {"piece": 1},
    ]
    transport = Local()
    for given in wrong:
        with pytest.raises(AtlasError):
            Node(made, **{"rank": 0, "memory": good, "transport": transport, **given})
        assert transport.open
        assert transport.registered == 0
    with Node(made, rank=0, memory=good, transport=transport):
        assert transport.registered
