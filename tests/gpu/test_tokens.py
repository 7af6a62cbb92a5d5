"""Prefill in one process, decode in another, both on the GPU: the tokens of an undisturbed run."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

pytest.importorskip("transformers")

from kvatlas.wire import Session
from tests.gpu.peer import Peer
from tests.gpu.tokens import Generating, undisturbed
from tests.handover.tiny import PROMPT


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.close()


@pytest.mark.parametrize("wire", ["cuda", "nixl", "shm"])
@pytest.mark.parametrize("name", ["dense", "sliding", "latent", "delta hybrid", "mamba hybrid"])
def test_tokens_after_a_hand_over(peer: Peer, name: str, wire: str) -> None:
    said = peer.ask("prefill", model=name, transport=wire, layout="LBNHC")
    assert "first" in said, said
    here = Generating(name, wire, layout="LBHNC")
    try:
        (blocks,) = here.cache.adopt(PROMPT)
        with Session(here.node, [said["endpoint"]]) as session:
            # Checked, which is asked for; seen on a board; and launched as it was prepared.
            for turn in range(4):
                for pool in here.cache.cache.pools.values():
                    pool.fill_(0xA5)
                checked = turn == 0
                session.pull(
                    f"r{turn}", destination_blocks=blocks, tokens=PROMPT, checksums=checked
                ).wait(30)
                time.sleep(0.05)  # what is prepared is so beside everything else
        assert here.go_on(said["first"]) == undisturbed(name)
    finally:
        here.node.close()
        peer.ask("prefilled")
