"""One thread, so that results do not depend on the machine; edges checked after every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.engines.guarded import Guarded, guarded


@pytest.fixture(autouse=True)
def _tiny_matrices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread and no oneDNN, which takes longer to set up than tiny matrices take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def pages() -> Iterator[Guarded]:
    with guarded() as made:
        yield made
