"""No byte of an operation arrives once it has settled."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvatlas.errors import AtlasError, Code
from kvatlas.routing import Copy
from kvatlas.wire import Memory, make_transport
from kvatlas.wire.transports.handles import Stepwise
from tests.attack.late_bytes import POOL, STOPPABLE, stopped_reads
from tests.wire.transports.conftest import skip_without
from tests.wire.transports.ends import Peer, eventually, soon
from tests.wire.transports.peer import End


@pytest.mark.parametrize("transport", STOPPABLE)
def test_a_source_that_goes_on_does_not_reach_memory_that_was_given_on(transport: str) -> None:
    skip_without(STOPPABLE[transport])
    assert stopped_reads(transport, 1) == (1, 1)


def test_closing_a_link_lets_what_is_under_way_come_to_its_end() -> None:
    """A source that is replying when the connection goes may not survive it."""
    kind = STOPPABLE["nixl"]
    skip_without(kind)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in kind.settings.items():
            patch.setenv(name, value)
        near, peer = End("nixl", dict(kind.options), {0: POOL}), Peer(kind, {}, {0: POOL})
        link = near.transport.connect(peer.metadata, peer.regions)
        peer.signal(signal.SIGSTOP)
        handle = link.read([Copy(0, 0, np.array([0]), np.array([0]), np.array([POOL]))])
        handle.release()
        begun = time.monotonic()
        link.close()
        assert time.monotonic() - begun < 2
        assert not handle.settle()
        peer.signal(signal.SIGCONT)
        assert eventually(handle.settle)
        assert eventually(lambda: not near.transport.links)  # type: ignore[attr-defined]
        near.transport.connect(peer.metadata, peer.regions).read([]).wait(soon())
        near.drop()
        peer.end()
        assert peer.process.exitcode == 0


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
