"""No byte of an operation arrives once it has settled."""

from __future__ import annotations

import pytest

from tests.attack.late_bytes import STOPPABLE, stopped_reads
from tests.wire.transports.conftest import skip_without


@pytest.mark.parametrize("transport", STOPPABLE)
def test_a_source_that_goes_on_does_not_reach_memory_that_was_given_on(transport: str) -> None:
    skip_without(STOPPABLE[transport])
    assert stopped_reads(transport, 2) == (2, 2)
