"""Reads that two agents carry out, as long as there are cores for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvatlas import AtlasError
from kvatlas.errors import Code
from kvatlas.routing import Copy
from kvatlas.wire import Memory
from kvatlas.wire.transports import errors, nixl_pair
from kvatlas.wire.transports.nixl import NixlTransport
from kvatlas.wire.transports.nixl_link import NixlHandle
from tests.wire.forking import HAS_NIXL
from tests.wire.helpers import until

pytestmark = pytest.mark.skipif(not HAS_NIXL, reason="needs NIXL")
RUN, RUNS = 4096, 64
POOL = RUN * RUNS


@contextmanager
def linked(patch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any, list[Any]]]:
    """A link that pairs for small reads too, the pool that it reads into, and who has posted."""
    patch.setattr(nixl_pair, "_WORTH", POOL // 4)
    patch.setattr(nixl_pair, "_DIVIDED", POOL // 2)
    start, posted = NixlHandle.start, list[Any]()

    def noting(handle: NixlHandle) -> None:
        posted.append(handle._link)
        start(handle)

    patch.setattr(NixlHandle, "start", noting)
    pools = [np.arange(POOL, dtype=np.uint32).view(np.uint8)[:POOL].copy(), np.zeros(POOL, "u1")]
    far, near = NixlTransport(), NixlTransport()
    for transport, pool in zip((far, near), pools, strict=True):
        transport.register({0: Memory(pool.ctypes.data, POOL, owner=pool)})
    near.copy_threads = 2
    link: Any = near.connect(far.publish(), far.memory)
    try:
        yield link, pools, posted
    finally:
        link.close()
        near.close()
        far.close()
    assert not near.links


def runs(count: int = RUNS) -> list[Copy]:
    at = np.random.default_rng(count).permutation(RUNS)[:count] * RUN
    return [Copy(0, 0, at, at, np.full(count, RUN))]


def read_until_paired(link: Any) -> None:
    link.read(runs()).wait(float("inf"))
    until(lambda: link._second is not None, 20)


def test_a_large_read_is_divided_and_arrives_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    with linked(monkeypatch) as (link, (there, here), posted):
        read_until_paired(link)
        assert posted == [link], "nobody waits for the other agent"
        assert np.array_equal(here, there)
        here[:] = 0
        posted.clear()
        handle = link.read(runs())
        handle.wait(float("inf"))
        assert handle.settle()
        assert set(posted) == {link, link._second}
        assert np.array_equal(here, there)
        link.owner.copy_threads = 1
        posted.clear()
        link.read(runs()).wait(float("inf"))
        assert posted == [link], "an engine that computes needs its cores"


def test_of_two_threads_that_read_each_has_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    with linked(monkeypatch) as (link, (there, here), posted):
        read_until_paired(link)
        posted.clear()
        reading = threading.Thread(target=lambda: link.read(runs(RUNS // 3)).wait(float("inf")))
        with link.lock:  # as while something is read
            reading.start()
            reading.join(20)
        assert posted == [link._second]
        link.read(runs(RUNS // 3)).wait(float("inf"))
        assert posted == [link._second, link]
        some = runs(RUNS // 3)[0].source[0]
        assert np.array_equal(here[some:][:RUN], there[some:][:RUN])


def test_a_half_that_fails_fails_the_read_once_both_have_come_to_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for broken in ("_second", "first"):
        with linked(monkeypatch) as (link, _, posted):
            read_until_paired(link)
            posted.clear()

            def failing(*_: Any, **__: Any) -> Any:
                raise errors.failed("a call")

            monkeypatch.setattr(link if broken == "first" else link._second, "_prepare", failing)
            handle = link.read(runs())
            with pytest.raises(AtlasError) as refusal:
                handle.wait(float("inf"))
            assert refusal.value.code is Code.WIRE_FAILED
            until(handle.settle, 20)
            assert len(posted) == 1


def test_an_interrupt_leaves_nothing_behind_that_is_still_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who reads is the thread that waits, and nobody else has the handle."""

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with linked(monkeypatch) as (link, (there, here), _):
        read_until_paired(link)
        here[:] = 0
        post, may_go = link._second._post, threading.Event()

        def slowly(*given: Any, **about: Any) -> Any:
            assert may_go.wait(20)
            return post(*given, **about)

        monkeypatch.setattr(link._second, "_post", slowly)
        with monkeypatch.context() as patch:
            patch.setattr(link, "_prepare", interrupted)
            later = threading.Timer(0.05, may_go.set)
            later.start()
            with pytest.raises(KeyboardInterrupt):
                link.read(runs())
            half = runs()[0].source[RUNS // 2 :]
            assert all(np.array_equal(here[at:][:RUN], there[at:][:RUN]) for at in half)
        with monkeypatch.context() as patch:
            patch.setattr(link.agent, "transfer", interrupted)
            with pytest.raises(KeyboardInterrupt):
                link.read(runs(1))
            assert link.ended
