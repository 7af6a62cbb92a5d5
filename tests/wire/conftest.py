"""A node to attack, and processes to kill."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.wire.attacked import Attacked
from tests.wire.helpers import End, ends, small
from tests.wire.processes import SMALL_BATCH, TARGET, Children, Here


@pytest.fixture(scope="module")
def attacked() -> Iterator[Attacked]:
    source = End(small("dense", layout="BLHNC"), 50, seed=1)
    target = End(small("dense", tp=2), 50, seed=2)
    with ends(source, target):
        source.nodes[0].offer("secret", source.blocks, 50, timeout=600)
        made = Attacked(source, target)
        yield made
        made.raw.close()


@pytest.fixture(scope="module")
def small_batches() -> Iterator[None]:
    """Many operations a transfer, so that there is something to interrupt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvatlas.wire.client.pull_pipeline._BATCH", SMALL_BATCH)
        yield


@pytest.fixture(scope="module")
def spares() -> Iterator[Children]:
    made = Children()
    yield made
    made.end()
    made.spare.kill()
    made.spare.close()


@pytest.fixture
def children(spares: Children) -> Iterator[Children]:
    yield spares
    spares.end()


@pytest.fixture(scope="module")
def here(request: pytest.FixtureRequest, small_batches: None) -> Iterator[Here]:
    """One node for all that happens over a transport: what leaks, adds up."""
    del small_batches
    made = Here(request.param, TARGET)
    yield made
    made.settled()
    made.rank.close()
