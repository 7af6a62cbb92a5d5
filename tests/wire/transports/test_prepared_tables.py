"""Tables of launches of one shape, without a GPU: when they are used again, and when they go."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import torch

from kvatlas.wire.transports.torch_prepared import _PostedTable, _RequestTable


class CountedEvents:
    """A driver's events: which there are, and whether what they were recorded behind is done."""

    def __init__(self) -> None:
        self.made = self.ended = 0
        self.over = False

    def local_event(self, _: int) -> int:
        self.made += 1
        return self.made

    def end_event(self, *_: int) -> None:
        self.ended += 1

    def finished(self, *_: int) -> bool:
        return self.over


def test_tables_are_used_again_and_given_back_once_their_copies_are_over() -> None:
    driver = CountedEvents()
    memory = lambda nbytes: (torch.empty(nbytes, dtype=torch.uint8),) * 2  # noqa: E731
    queue: Any = SimpleNamespace(driver=driver, number=0, buffers=memory)
    table = _RequestTable(queue, [])
    first = table.posted = _PostedTable(table)
    assert not first.done()
    assert not table.free
    driver.over = True
    assert table.free
    driver.over = False  # the event is recorded for the next
    second = table.posted = _PostedTable(table)
    assert first.done()
    assert not second.done()
    gc.disable()  # as engines do that must not stop
    try:
        del table
        assert driver.ended == 0, "a copy reads it"
        driver.over = True
        assert second.done()
        assert driver.ended == driver.made == 2
    finally:
        gc.enable()
