"""No byte of an operation arrives once it has settled."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvatlas.errors import AtlasError, Code
from kvatlas.routing import Copy
from kvatlas.wire import Memory, make_transport
from kvatlas.wire.transports.polled_copy import Stepwise
from tests.attack.late_bytes import STOPPABLE, stopped_reads
from tests.wire.transports.conftest import skip_without


@pytest.mark.parametrize("transport", STOPPABLE)
def test_a_source_that_goes_on_does_not_reach_memory_that_was_given_on(transport: str) -> None:
    skip_without(STOPPABLE[transport])
    assert stopped_reads(transport, 2) == (2, 2)


def test_a_copy_has_settled_once_no_step_of_it_runs() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def steps() -> Iterator[None]:
        yield
        inside.set()
        assert go_on.wait(10)
        yield

    handle = Stepwise(steps())
    assert not handle.poll()
    assert not handle.settle()  # under way, though no step is running
    stepping = threading.Thread(target=handle.poll)
    stepping.start()
    assert inside.wait(10)
    handle.release()
    assert not handle.settle()
    go_on.set()
    stepping.join()
    assert handle.settle()
    with pytest.raises(AtlasError) as refusal:
        handle.poll()
    assert refusal.value.code is Code.CANCELLED
    assert handle.settle()


def test_what_is_done_or_has_failed_has_settled() -> None:
    def fails() -> Iterator[None]:
        yield
        raise OSError("the disk")

    done, failed = Stepwise(iter(())), Stepwise(fails())
    assert done.poll()
    assert done.settle()
    assert not failed.poll()
    with pytest.raises(AtlasError):
        failed.poll()
    assert failed.settle()


def test_a_severed_link_is_closed_and_its_copies_settle() -> None:
    pools = [np.zeros(64 << 20, np.uint8) for _ in range(2)]
    ends = [make_transport("memory") for _ in range(2)]
    for end, pool in zip(ends, pools, strict=True):
        end.register({0: Memory(pool.ctypes.data, pool.nbytes)})
    link = ends[1].connect(ends[0].publish(), ends[0].memory)
    copy = Copy(0, 0, np.array([0]), np.array([0]), np.array([64 << 20]))
    handle = link.read([copy])
    assert not handle.poll()
    link.sever()
    link.sever()
    with pytest.raises(AtlasError) as refusal:
        handle.poll()
    assert refusal.value.code is Code.WIRE_FAILED
    assert handle.settle()
    nothing = ends[1].connect(ends[0].publish(), ends[0].memory).read([])
    assert nothing.settle()
    for end in ends:
        end.close()
