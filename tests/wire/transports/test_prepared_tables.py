"""Launches that were prepared, without a GPU: what they move, and when their tables go."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from kvatlas.copying import address_runs
from kvatlas.copying.cuda_driver import DriverError
from kvatlas.copying.device_queue import AddressPattern, Posted
from kvatlas.copying.torch_prepared import MOST_IDS, TorchPreparedRuns, fits
from kvatlas.routing import RequestShape, route, scattered
from tests.wire.helpers import small
from tests.wire.transports.fake_launches import FakeLaunches, FakeLaunchQueue


class Prepared:
    """Two ends in host memory, and launches of requests between them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, driver: FakeLaunches) -> None:
        self.source, self.destination = (
            small("dense", layout="LBNHC"),
            small("dense", block_size=32),
        )
        self.way = route(self.source, self.destination)
        self.rng = np.random.default_rng(3)
        self.there, self.here = (
            self.rng.integers(0, 256, plan.pools[0].nbytes, np.uint8)
            for plan in (self.source, self.destination)
        )
        self.driver, self.queue = driver, FakeLaunchQueue(driver)
        monkeypatch.setattr(address_runs, "RepeatedCopy", self.queue.kernel)

    def stream(self, tokens: int) -> Any:
        """A request in blocks drawn anew."""
        drawn = []
        for plan in (self.source, self.destination):
            count = len(scattered(plan, tokens)[0])
            drawn.append({0: self.rng.permutation(plan.pools[0].blocks)[:count]})
        ends: dict[str, Any] = {"source_rank": 0, "destination_rank": 0, "tokens": tokens}
        return self.way.stream(source_blocks=drawn[0], destination_blocks=drawn[1], **ends)

    def runs(self, shape: RequestShape) -> TorchPreparedRuns:
        ends = self.there.ctypes.data, self.here.ctypes.data
        blocks = self.source.pools[0].blocks
        patterns = [AddressPattern(*ends, one, blocks) for one in shape.patterns]
        return TorchPreparedRuns(self.queue, patterns)

    def post(self, runs: TorchPreparedRuns, stream: Any) -> tuple[Posted | None, Any]:
        """Launch a request; what is under way, and what is here once it is over."""
        right = self.here.copy()
        for copy in stream.walk():
            for a, b, length in zip(copy.source, copy.destination, copy.length, strict=True):
                right[b : b + length] = self.there[a : a + length]
        tables = stream._request.source.by_group, stream._request.destination.by_group
        return runs.post(*tables), right


def test_prepared_launches_of_unlike_lengths_take_tables_in_turn_and_move_every_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = Prepared(monkeypatch, FakeLaunches())
    by_length = {tokens: ends.runs(ends.stream(tokens).shape()) for tokens in (61, 17, 1, 48)}
    launched = []
    for tokens in (61, 17, 61, 1, 61, 48, 61, 17, 17, 1, 61):
        ends.driver.log.clear()
        posted, right = ends.post(by_length[tokens], ends.stream(tokens))
        assert posted is not None
        assert not posted.done()
        assert not np.array_equal(ends.here, right), "nothing is copied before its turn"
        launched.append("graph" in ends.driver.log)
        ends.driver.go_on()
        assert posted.done()
        assert np.array_equal(ends.here, right), tokens
    assert launched[-1], "what was launched before is launched by one call"
    assert not any(launched[:3])


@pytest.mark.parametrize("writes_words", [True, False])
def test_so_many_copies_are_under_way_as_there_are_tables(
    monkeypatch: pytest.MonkeyPatch, writes_words: bool
) -> None:
    ends = Prepared(monkeypatch, FakeLaunches(writes_words=writes_words))
    runs, stream = ends.runs(ends.stream(61).shape()), ends.stream(61)
    posted = [ends.post(runs, stream)[0] for _ in range(5)]
    assert [one is None for one in posted] == [False] * 4 + [True]
    ends.driver.go_on()
    again = ends.post(runs, stream)[0]
    first = posted[0]
    assert first is not None
    assert first.done(), "although its table is used again"
    assert again is not None
    assert not again.done()
    again.wait()
    assert again.done()


def test_a_device_that_fails_is_noticed_although_its_word_is_never_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = Prepared(monkeypatch, FakeLaunches())
    posted, _ = ends.post(ends.runs(ends.stream(61).shape()), ends.stream(61))
    assert posted is not None
    ends.driver.failed = True
    with pytest.raises(DriverError):
        any(posted.done() for _ in range(1000))


def test_a_launch_that_fails_is_waited_for_and_its_table_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = Prepared(monkeypatch, FakeLaunches())
    runs, stream = ends.runs(ends.stream(61).shape()), ends.stream(61)
    monkeypatch.setattr(ends.driver, "write_word", lambda *_: 1 / 0)
    for _ in range(6):
        with pytest.raises(ZeroDivisionError):
            ends.post(runs, stream)
    assert ends.queue.waits == 6
    monkeypatch.undo()
    posted, right = ends.post(runs, stream)
    ends.driver.go_on()
    assert posted is not None
    assert posted.done()
    assert np.array_equal(ends.here, right)


def test_what_launches_a_copy_is_given_back_once_nobody_has_it_and_the_copy_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FakeLaunches()
    ends = Prepared(monkeypatch, driver)
    runs, stream = ends.runs(ends.stream(61).shape()), ends.stream(61)
    gc.disable()  # as engines do that must not stop
    try:
        for _ in range(3):
            posted, _ = ends.post(runs, stream)
            driver.go_on()
            assert posted is not None
            assert posted.done()
        posted, _ = ends.post(runs, stream)
        del runs
        assert not driver.ended, "it is under way"
        driver.go_on()
        assert posted is not None
        assert posted.done()
        assert driver.ended == [("graph", 0)]
        del posted, ends, stream
        monkeypatch.undo()
        assert sum(what == "event" for what, _ in driver.ended) == len(driver.events)
    finally:
        gc.enable()


def test_block_ids_that_a_source_made_up_touch_no_memory_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = Prepared(monkeypatch, FakeLaunches())
    stream = ends.stream(61)
    runs = ends.runs(stream.shape())
    src, dst = stream._request.source.by_group, stream._request.destination.by_group
    for made_up in (0xFFFFFFFF, ends.source.pools[0].blocks):
        lies = {0: np.full(len(src[0]), made_up, np.uint32)}
        posted = runs.post(lies, dst)
        ends.driver.go_on()
        assert posted is not None
        assert posted.done()


def test_requests_of_more_blocks_than_there_is_room_for_are_not_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = Prepared(monkeypatch, FakeLaunches())
    (pattern, *_) = ends.stream(61).shape().patterns
    for blocks, room in ((MOST_IDS // 2, True), (MOST_IDS // 2 + 1, False)):
        entries = (np.array([0, blocks - 1]),) * 2
        many = pattern._replace(template=pattern.template._replace(entries=entries))
        assert fits([AddressPattern(0, 0, many, blocks)]) is room
    assert not fits([])
