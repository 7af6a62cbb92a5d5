"""Prefill in one process, decode in another, both on the GPU: the tokens of an undisturbed run."""

from __future__ import annotations

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
            session.pull("r", dst_blocks=blocks, tokens=PROMPT, checksums=True).wait(30)
        assert here.go_on(said["first"]) == undisturbed(name)
    finally:
        here.node.close()
        peer.ask("prefilled")
