"""Caches of GPUs between processes, with a driver that is none: handles, order, refusals."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from kvatlas import AtlasError, Code
from kvatlas.copying.cuda_driver import CudaDriver, DriverError, load_driver
from kvatlas.copying.device_marks import EVENTS, DeviceMarks
from kvatlas.copying.memory_copy import as_bytes
from kvatlas.routing import Copy, route, scattered
from kvatlas.routing.binding import Starts
from kvatlas.wire import Memory, Session, Transfer
from kvatlas.wire.protocol import Release
from kvatlas.wire.transports import cuda
from kvatlas.wire.transports.cuda import CudaTransport
from kvatlas.wire.transports.cuda_copy import CopyPace
from kvatlas.wire.transports.offer_board import OfferBoard, PeerBoard
from kvatlas.wire.transports.opened_memory import ForeignAllocation, OpenedMemory
from tests.routing import oracle
from tests.wire.helpers import small
from tests.wire.transports.ends import eventually
from tests.wire.transports.fake_cuda import FakeCuda, FakeMachine, node_of

SIZE = 4096


class GpuEnd:
    """A transport of a process of its own, with one pool."""

    def __init__(
        self,
        machine: FakeMachine,
        nbytes: int = SIZE,
        seed: int = 0,
        driver: FakeCuda | None = None,
        **given: Any,
    ) -> None:
        self.driver = driver or FakeCuda(machine, **given)
        self.memory, self.pool = self.driver.allocate(nbytes)
        self.pool[:] = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
        self.transport = CudaTransport(driver=self.driver, share=1.0)
        self.transport.register({0: self.memory})

    def connect(self, other: GpuEnd) -> Any:
        return self.transport.connect(other.transport.publish(), other.transport.memory)


def runs(*rows: tuple[int, int, int]) -> list[Copy]:
    return [Copy(0, 0, *(np.array(column, np.int64) for column in zip(*rows, strict=True)))]


def code_of(act: Any) -> Code:
    with pytest.raises(AtlasError) as refused:
        act()
    code: Code = refused.value.code
    return code


def test_runs_are_read_within_the_pools() -> None:
    machine = FakeMachine()
    source, target = GpuEnd(machine, seed=1), GpuEnd(machine, seed=2)
    link = target.connect(source)
    link.read(runs((0, 100, 64), (1000, 8, 32))).wait(float("inf"))
    assert np.array_equal(target.pool[100:164], source.pool[:64])
    assert np.array_equal(target.pool[8:40], source.pool[1000:1032])
    assert code_of(lambda: link.read(runs((SIZE - 8, 0, 9)))) is Code.OUT_OF_BOUNDS
    link.close()
    assert code_of(lambda: link.read(runs((0, 0, 1)))) is Code.WIRE_FAILED


def test_an_allocation_is_mapped_once_and_unmapped_when_the_peer_goes() -> None:
    machine = FakeMachine()
    source, target = GpuEnd(machine), GpuEnd(machine)
    one, other = target.connect(source), target.connect(source)
    for link in (one, other, one):
        link.read(runs((0, 0, 8))).wait(float("inf"))
    assert target.driver.opens == 1
    target.driver.late = True
    under_way = one.read(runs((0, 64, 8)))
    one.close()
    assert sum(target.driver.opened.values()) == 1, "unmapped under a copy"
    assert not under_way.settle()
    target.driver.finish()
    assert under_way.settle()
    assert sum(target.driver.opened.values()) == 0
    other.read(runs((0, 0, 8)))
    assert target.driver.opens == 2, "a link that goes on maps it again"


def test_what_was_used_longest_ago_is_unmapped_first() -> None:
    machine = FakeMachine()
    far, here = FakeCuda(machine), FakeCuda(machine)
    allocations = []
    for number in range(3):
        memory, _ = far.allocate(64)
        base, nbytes = far.allocation(0, memory.address)
        allocations.append(ForeignAllocation(f"{number}", far.export_memory(0, base), nbytes))
    opened = OpenedMemory(here, 0, most=2)
    first = opened.map(allocations[0])
    opened.release([opened.map(allocations[1])])
    opened.release([opened.map(allocations[2])])  # the first is in use: the second has to go
    assert (len(opened), here.opens) == (2, 3)
    opened.release([first])
    opened.map(allocations[1])
    assert (len(opened), here.opens) == (2, 4)


def test_a_handle_of_freed_memory_is_refused_before_anything_moves() -> None:
    machine = FakeMachine()
    source, target = GpuEnd(machine), GpuEnd(machine)
    told = source.transport.publish(), source.transport.memory
    source.driver.free(source.memory)
    assert code_of(lambda: target.transport.connect(*told)) is Code.PEER_LOST
    assert not target.driver.opened.total()


def test_a_peer_of_another_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = FakeMachine()
    source, target = GpuEnd(machine), GpuEnd(machine)
    told = source.transport.publish(), source.transport.memory
    monkeypatch.setattr(cuda, "_host", lambda: "elsewhere")
    assert code_of(lambda: target.transport.connect(*told)) is Code.WRONG_DEVICE


def test_a_gpu_that_is_not_seen_is_refused() -> None:
    machine = FakeMachine(gpus=2)
    source, target = GpuEnd(machine, sees=[1]), GpuEnd(machine, sees=[0])
    assert code_of(lambda: target.connect(source)) is Code.WRONG_DEVICE
    one = CudaTransport(driver=FakeCuda(machine))
    assert code_of(lambda: one.register({0: Memory(1 << 20, 8, "cuda:1")})) is Code.WRONG_DEVICE
    both = {0: Memory(1 << 20, 8, "cuda:0"), 1: Memory(1 << 21, 8, "cuda:1")}
    two = CudaTransport(driver=FakeCuda(machine, sees=[0, 1]))
    assert code_of(lambda: two.register(both)) is Code.WRONG_DEVICE


def test_host_memory_and_foreign_memory_are_refused() -> None:
    driver = FakeCuda(FakeMachine())
    transport = CudaTransport(driver=driver, share=1.0)
    memory, _ = driver.allocate(64)
    host = Memory(memory.address, 64)
    nowhere, too_long = Memory(1 << 20, 64, "cuda:0"), Memory(memory.address, 4096, "cuda:0")
    assert code_of(lambda: transport.register({0: host})) is Code.WRONG_DEVICE
    assert code_of(lambda: transport.register({0: nowhere})) is Code.WRONG_DEVICE
    assert code_of(lambda: transport.register({0: too_long})) is Code.OUT_OF_BOUNDS


def test_metadata_that_no_transport_has_published_is_refused() -> None:
    machine = FakeMachine()
    source, target = GpuEnd(machine), GpuEnd(machine)
    good = msgspec.msgpack.decode(source.transport.publish())
    [[handle, nbytes]] = good["allocations"]
    lies: tuple[dict[str, Any], ...] = (
        {"token": "no token"},
        {"device": b"short"},
        {"events": good["events"][:-1]},
        {"events": [b"short"] * EVENTS},
        {"allocations": [[b"short", nbytes]]},
        {"allocations": [[handle, nbytes + 1]]},
        {"allocations": [[handle, nbytes]] * 1025},
        {"allocations": []},
        {"regions": {0: [0, 0, SIZE + 1]}},
        {"regions": {0: [0, nbytes - SIZE + 1, SIZE]}},
        {"regions": {0: [0, -1, SIZE]}},
        {"regions": {0: [7, 0, SIZE]}},
        {"regions": {}},
    )
    for lie in lies:
        told = msgspec.msgpack.encode(good | lie)
        code = code_of(lambda told=told: target.transport.connect(told, source.transport.memory))
        assert code is Code.BAD_HANDSHAKE, lie
    assert not target.driver.opened.total()


def test_a_machine_without_a_gpu_says_so() -> None:
    load_driver.cache_clear()
    assert code_of(CudaTransport) is Code.WRONG_DEVICE


@pytest.mark.parametrize("name", ["dense", "delta hybrid", "latent"])
def test_requests_move_in_sums_behind_both_ends_marks(name: str) -> None:
    """Every element is where brute force says; and the order of events is what makes it so."""
    machine, rng, tokens = FakeMachine(), np.random.default_rng(4), 61
    src, dst = small(name), small(name, block_size=32)
    move = oracle.Move(src, dst, scattered(src, tokens), scattered(dst, tokens), (0, tokens))
    filled = oracle.fill(move, rng)[0].pools
    with node_of(src, machine, rng) as (source, theirs, _), node_of(dst, machine, rng) as there:
        target, pools, driver = there
        for index, pool in theirs.items():
            pool[:] = filled[index]
        poison = oracle.Memory(dst, 0, rng)
        for index, pool in poison.pools.items():
            pool[:] = pools[index]
        source.offer("r", move.source_blocks, tokens)
        with Session(target, [source.endpoint]) as session:
            about: dict[str, Any] = {
                "destination_blocks": move.destination_blocks,
                "tokens": tokens,
            }
            assert session.pull("r", **about).wait(20).ready
        right, _ = oracle.expected(move, 0, poison)
        for index, pool in pools.items():
            assert np.array_equal(pool, right.beside(index, pool))
        # Nobody synchronizes: both queues follow this end's mark, the source's is looked at.
        acts = [what for what, _ in driver.log]
        assert acts == ["record", "after", "after", "finished", "post", "end"]


def moved_by(target: Any, source: Any, most: int, **about: Any) -> Any:
    blocks = scattered(target.plan, most)
    session = Session(target, [source.endpoint])
    asked: dict[str, Any] = {"destination_blocks": blocks, "tokens": most, **about}
    return session, session.pull("r", **asked)


def test_a_pull_of_what_is_seen_asks_nothing_before_it_is_ready() -> None:
    machine, rng, tokens = FakeMachine(), np.random.default_rng(4), 61
    src, dst = small("dense"), small("dense", block_size=32)
    released: list[str] = []
    with node_of(src, machine, rng) as (source, _, _), node_of(dst, machine, rng) as there:
        target = there[0]
        told = {"timeout": 30, "released": lambda _, why: released.append(why)}
        source.offer("r", scattered(src, tokens), tokens, **told)
        with Session(target, [source.endpoint]) as session:
            before = source.metrics.values["messages"]
            asked: list[Any] = []
            answer = source.server.answer

            def heard(question: Any, caller: Any) -> Any:
                asked.append(type(question).__name__)
                return answer(question, caller)

            source.server.answer = heard
            about: dict[str, Any] = {"destination_blocks": scattered(dst, tokens), "tokens": tokens}
            assert session.pull("r", **about).wait().ready
        # Only then: everything that was asked is that the offer may end, which it has.
        assert asked == ["Release"]
        assert source.metrics.values["messages"] == before + 1
        assert released == ["read"]


def test_an_offer_that_is_withdrawn_under_the_copy_delivers_nothing() -> None:
    machine, rng, tokens = FakeMachine(), np.random.default_rng(4), 61
    made = small("dense")
    with node_of(made, machine, rng) as (source, _, _), node_of(made, machine, rng) as there:
        target, _, driver = there
        source.offer("r", scattered(made, tokens), tokens)
        driver.late = True
        session, transfer = moved_by(target, source, tokens)
        with session:
            assert eventually(lambda: driver.pending)
            source.withdraw("r")
            driver.finish()
            assert code_of(transfer.wait) is Code.LEASE_EXPIRED


def test_what_is_seen_is_refused_as_what_is_asked_for() -> None:
    machine, rng, tokens = FakeMachine(), np.random.default_rng(4), 61
    made = small("dense")
    lies: list[tuple[dict[str, Any], Code]] = [
        ({"tokens": 62}, Code.BAD_TOKENS),
        ({"source_blocks": [0, 1, 2, 3]}, Code.UNKNOWN_REQUEST),
        ({"source_blocks": [1]}, Code.UNKNOWN_REQUEST),
    ]
    with node_of(made, machine, rng) as (source, _, _), node_of(made, machine, rng) as there:
        source.offer("r", scattered(made, tokens), tokens)
        source.offer("some", scattered(made, tokens), tokens, readers=["nobody"])
        for lie, code in lies:
            session, transfer = moved_by(there[0], source, tokens, **lie)
            with session:
                assert code_of(transfer.wait) is code, lie
        with Session(there[0], [source.endpoint]) as session:
            board = session.link(0).board
            assert board is not None
            assert board.find("r") is not None
            assert board.find("some") is None, "not for everybody to see"
            right: dict[str, Any] = {
                "destination_blocks": scattered(made, tokens),
                "source_blocks": scattered(made, tokens),
            }
            assert session.pull("r", **right, tokens=tokens).wait().ready


def test_who_waits_does_what_nobody_has_begun() -> None:
    done: list[int] = []
    transfer = Transfer("r", ranks=(0,), total=None, timeout=30)

    def act() -> None:
        done.append(threading.get_ident())
        transfer.finished(0)

    part = transfer.add_part(act, quick=True)
    assert transfer.wait().ready
    part()
    assert done == [threading.get_ident()], "once, and by who waited"
    transfer.join()


def test_copies_take_their_share_of_the_time_and_begin_at_once_after_a_quiet_time() -> None:
    now, gib = [100.0], 1 << 30
    pace = CopyPace(0.1, clock=lambda: now[0])
    busy = 0.0
    for _ in range(80_000):
        if pace.may_begin():
            pace.took(now[0], now[0] + 1e-3, gib)
            pace.took(now[0] + 5e-4, now[0] + 1e-3, gib)  # at the same time: counts once
            busy += 1e-3
            now[0] += 1e-3
        else:
            now[0] += 1e-4
    assert busy / (now[0] - 100.0) == pytest.approx(0.1, rel=0.1)
    now[0] += 1.0
    at_once = 0
    while pace.may_begin():
        pace.took(now[0], now[0] + 1e-3, gib)
        now[0] += 1e-3
        at_once += 1
    assert 10 <= at_once <= 12
    for share in (0, -1, 1.5, "all"):
        bad: Any = share
        assert code_of(lambda bad=bad: CudaTransport(driver=FakeCuda(FakeMachine()), share=bad))


class LaggingDriver(FakeCuda):
    """A device that does what was recorded in order, a hundred steps behind the host."""

    after_event = 100

    def __init__(self) -> None:
        super().__init__(FakeMachine())
        self.now, self.recorded = 0, dict[int, int]()

    def recorder(self, device: int, stream: int) -> Callable[[int], None]:
        del device, stream
        return lambda event: self.recorded.__setitem__(event, self.now)

    def finished(self, device: int, event: int) -> bool:
        del device
        return self.recorded[event] + self.after_event <= self.now


def test_a_gpu_that_has_failed_is_refused_with_a_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(*_: int) -> bool:
        raise DriverError("700")

    driver = FakeCuda(FakeMachine())
    marks = DeviceMarks(driver, 0)
    monkeypatch.setattr(driver, "finished", failed)
    with pytest.raises(AtlasError) as refusal:
        [marks.mark() for _ in range(EVENTS + 1)]
    assert refusal.value.code is Code.WIRE_FAILED


def test_a_mark_is_seen_to_be_done_although_others_are_made_all_the_time() -> None:
    driver = LaggingDriver()
    marks = DeviceMarks(driver, 0)
    begun: dict[int, int] = {}
    longest = 0
    for step in range(1000):
        driver.now = step
        begun.setdefault(marks.mark(), step)
        for number in [one for one in begun if marks.passed(one)]:
            assert step >= begun[number] + driver.after_event, "never for less"
            longest = max(longest, step - begun.pop(number))
    assert 0 < longest <= 2 * driver.after_event
    assert all(step > 1000 - 2 * driver.after_event for step in begun.values())
    board = OfferBoard()
    marks.board = board
    for step in range(1000, 1300):
        driver.now = step
        marks.mark()
    assert 0 < PeerBoard(board.memory, None).marks_done == marks.done


def test_peers_see_on_the_board_that_a_mark_is_done_once_another_is_made() -> None:
    driver = LaggingDriver()
    marks, board = DeviceMarks(driver, 0), OfferBoard()
    marks.board = board
    seen = PeerBoard(board.memory, None)
    for step in range(1000):
        driver.now = step * driver.after_event
        assert marks.mark() == step
        assert seen.marks_done == step - 1
    driver.after_event = 10**6  # a device that does nothing more
    told = seen.marks_done
    for _ in range(3 * EVENTS):
        marks.mark()
        assert seen.marks_done <= told + 1, "never for less"


def test_an_offer_made_anew_is_not_ended_by_who_has_read_the_one_before() -> None:
    machine, rng, tokens = FakeMachine(), np.random.default_rng(4), 61
    made = small("dense")
    released: list[str] = []
    with node_of(made, machine, rng) as (source, _, _), node_of(made, machine, rng) as there:

        def offer(name: str) -> None:
            told = lambda request, why: released.append(f"{name} {request} {why}")  # noqa: E731
            source.offer("r", scattered(made, tokens), tokens, released=told)

        answer = source.server.answer

        def late(question: Any, caller: Any) -> Any:
            if isinstance(question, Release):  # it was long on its way
                source.withdraw("r")
                offer("second")
            return answer(question, caller)

        offer("first")
        session, transfer = moved_by(there[0], source, tokens)
        source.server.answer = late
        with session:
            assert transfer.wait(20).ready
        assert released == ["first r withdrawn"]


def test_layers_that_wait_for_the_gpu_of_a_busy_source_are_not_held_back() -> None:
    """A GPU takes processes in turns: a layer of 32 MiB is seen to end milliseconds late."""
    now = [0.0]
    pace = CopyPace(0.08, clock=lambda: now[0])
    for _ in range(3 * 32):
        assert pace.may_begin()
        pace.took(now[0], now[0] + 2e-3, 32 << 20)
        now[0] += 2e-3


def test_nothing_is_launched_before_the_sources_mark_is_done_or_after_it_was_given_up() -> None:
    """A stream that waited for the event of a process that died would wait for ever."""
    machine = FakeMachine()
    source, target = GpuEnd(machine), GpuEnd(machine)
    link = target.connect(source)
    column = np.zeros(1, np.int64)
    grid = Copy(0, 0, column, column, column + 8, starts=Starts.of(column, column))
    target.driver.busy = True
    waiting, given_up = link.read([grid], 3), link.read([grid], 3)
    assert not waiting.poll()
    assert not given_up.settle()
    given_up.release()
    assert given_up.settle(), "what was never launched is over"
    assert ("post", 1) not in target.driver.log
    target.driver.busy = False
    waiting.wait(float("inf"))
    assert target.driver.log.count(("post", 1)) == 1
    far = Copy(0, 0, column, column, column + 8, starts=Starts.of(column, column + SIZE))
    assert code_of(lambda: link.read([far])) is Code.OUT_OF_BOUNDS


def test_the_runs_of_a_stream_are_the_sums_of_its_grids() -> None:
    for name in ("dense", "sliding", "delta hybrid", "latent"):
        src, dst = small(name, 200), small(name, 200, block_size=32)
        blocks = scattered(src, 190), scattered(dst, 190)
        stream = route(src, dst).stream(
            source_rank=0,
            destination_rank=0,
            source_blocks=blocks[0],
            destination_blocks=blocks[1],
            tokens=(0, 190),
        )
        written: dict[tuple[int, int], list[int]] = {}
        for copy in stream.walk():
            for a, b, n in zip(copy.source, copy.destination, copy.length, strict=True):
                written[copy.source_pool, int(b)] = [int(a), int(n)]
        bytes_of_runs = {(p, b + i): a + i for (p, b), (a, n) in written.items() for i in range(n)}
        found: dict[tuple[int, int], int] = {}
        for grid in stream.grids():
            for a, b in zip(grid.starts.source, grid.starts.destination, strict=True):
                for x, y, n in zip(grid.source, grid.destination, grid.length, strict=True):
                    for i in range(int(n)):
                        assert (grid.source_pool, int(b + y) + i) not in found
                        found[grid.source_pool, int(b + y) + i] = int(a + x) + i
        assert found == bytes_of_runs


def test_devices_are_named() -> None:
    """GPU 0 is no host memory, whatever its number."""
    gpu = Memory(1 << 20, 64, "cuda:0")
    assert (gpu.number, Memory(1 << 20, 64, "cuda:11").number) == (0, 11)
    assert gpu != Memory(1 << 20, 64)
    assert code_of(lambda: as_bytes(gpu)) is Code.WRONG_DEVICE
    for name in ("gpu", "cuda", "cuda:-1", "cuda:01", "cuda:99999", "cpu", "", 0, None):
        bad: Any = name
        assert code_of(lambda bad=bad: Memory(0, 1, bad)) is Code.WRONG_DEVICE


def test_the_driver_is_an_interface() -> None:
    assert isinstance(FakeCuda(FakeMachine()), CudaDriver)
