"""The parts of a wire by themselves, against brute force and against every order of events."""

from __future__ import annotations

import itertools
import re
import sys
import threading
import zlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas import AtlasError
from kvatlas.errors import Code
from kvatlas.route import Copy
from kvatlas.wire import Memory, Metrics, Transfer
from kvatlas.wire import messages as say
from kvatlas.wire.channel import ask, zmq
from kvatlas.wire.leases import Leases
from kvatlas.wire.staging import cut, gather, scatter, stream_bytes, sums, view
from kvatlas.wire.transport import Done, Handle, check_bounds

POOL = 4096
REFUSAL = AtlasError(Code.PEER_LOST, "rule", got="got", hint="hint")

# -- staging ------------------------------------------------------------------------------


@st.composite
def copies(draw: st.DrawFn) -> list[Copy]:
    """Runs that share no destination byte, of one length or of many, in two pools."""
    found = []
    for pool in range(draw(st.integers(1, 2))):
        length = draw(st.integers(1, 40))
        alike = draw(st.booleans())
        rows = draw(st.lists(st.integers(1, 40), max_size=24))
        lengths = np.array([length if alike else n for n in rows], dtype=np.int64)
        gaps = np.array([draw(st.integers(0, 9)) for _ in rows], dtype=np.int64)
        dst = np.cumsum(lengths + gaps) - lengths
        step = draw(st.sampled_from([1, length]))
        top = (POOL - 40) // step
        src = [draw(st.integers(0, top)) * step for _ in rows]
        order = np.array(draw(st.permutations(range(len(rows)))), dtype=np.int64)
        starts = np.array(src, dtype=np.int64)
        found.append(Copy(pool, 1 - pool, starts, dst[order], lengths[order]))
    return found


def spelled_out(given: list[Copy]) -> list[tuple[int, int, int, int]]:
    """Every byte of a stream: (source pool, offset, destination pool, offset)."""
    return [
        (copy.src_pool, int(a) + i, copy.dst_pool, int(b) + i)
        for copy in given
        for a, b, n in zip(copy.src, copy.dst, copy.length, strict=True)
        for i in range(int(n))
    ]


def pools_of(seed: int) -> dict[int, Any]:
    rng = np.random.default_rng(seed)
    return {i: rng.integers(0, 256, POOL, dtype=np.uint8) for i in (0, 1)}


@given(copies(), st.data())
def test_a_cut_is_that_part_of_the_stream(whole: list[Copy], data: st.DataObject) -> None:
    every = spelled_out(whole)
    assert stream_bytes(whole) == len(every)
    start = data.draw(st.integers(0, len(every) + 3))
    stop = data.draw(st.integers(start, len(every) + 5))
    assert spelled_out(cut(whole, start, stop)) == every[start:stop]


@given(copies(), st.integers(1, 300))
def test_pieces_make_up_the_stream(whole: list[Copy], piece: int) -> None:
    total = stream_bytes(whole)
    parts = [cut(whole, a, min(total, a + piece)) for a in range(0, total, piece)]
    assert [byte for part in parts for byte in spelled_out(part)] == spelled_out(whole)


@given(copies())
def test_gathering_and_scattering_touch_nothing_else(whole: list[Copy]) -> None:
    src, dst = pools_of(1), pools_of(2)
    total = stream_bytes(whole)
    room = np.full(total + 64, 7, dtype=np.uint8)
    assert gather(whole, src, room[32 : 32 + total]) == total
    every = spelled_out(whole)
    assert room[32 : 32 + total].tolist() == [int(src[p][a]) for p, a, _, _ in every]
    assert (room[:32] == 7).all()
    assert (room[32 + total :] == 7).all()
    right = {i: pool.copy() for i, pool in dst.items()}
    for pool, a, other, b in every:
        right[other][b] = src[pool][a]
    assert scatter(whole, room[32 : 32 + total], dst) == total
    for i in dst:
        assert np.array_equal(dst[i], right[i])
    for i, before in pools_of(1).items():
        assert np.array_equal(src[i], before)


@given(copies(), st.integers(1, 200), st.data())
def test_checksums_are_those_of_the_bytes(
    whole: list[Copy], piece: int, data: st.DataObject
) -> None:
    src, dst = pools_of(1), pools_of(2)
    every = spelled_out(whole)
    start = data.draw(st.integers(0, len(every)))
    stop = data.draw(st.integers(start, len(every)))
    stream = bytes(int(src[p][a]) for p, a, _, _ in every[start:stop])
    right = [zlib.crc32(stream[a : a + piece]) for a in range(0, len(stream), piece)]
    assert sums(whole, src, (start, stop), piece, src=True).tolist() == right
    room = np.empty(len(every), dtype=np.uint8)
    gather(whole, src, room)
    scatter(whole, room, dst)
    assert sums(whole, dst, (start, stop), piece, src=False).tolist() == right


@pytest.mark.parametrize("length", [1, 3, 4096, 32 << 10, 40_000])
@pytest.mark.parametrize("many", [1, 3, 4, 9])
@pytest.mark.parametrize("step", ["whole", "odd"])
def test_long_and_short_runs_are_gathered_alike(length: int, many: int, step: str) -> None:
    rng = np.random.default_rng(length * many)
    pool = rng.integers(0, 256, (length + 7) * (many + 2), dtype=np.uint8)
    apart = length if step == "whole" else length + 5
    starts = rng.permutation(many) * apart + 3
    lengths = np.full(many, length)
    one = Copy(0, 0, starts, np.sort(starts), lengths)
    out = np.empty(length * many, dtype=np.uint8)
    gather([one], {0: pool}, out)
    assert out.tobytes() == b"".join(pool[s : s + length].tobytes() for s in starts)


def test_a_view_is_the_memory_itself() -> None:
    room = np.zeros(64, dtype=np.uint8)
    view(Memory(room.ctypes.data + 8, 16))[:] = 9
    assert room.tolist() == [0] * 8 + [9] * 16 + [0] * 40
    assert view(Memory(room.ctypes.data, 0)).size == 0


# -- bounds -------------------------------------------------------------------------------

REGIONS = {0: Memory(4096, 1000)}


def one_run(src: int, dst: int, length: int, pool: int = 0) -> list[Copy]:
    src_at, dst_at, many = (np.array([n], dtype=np.int64) for n in (src, dst, length))
    return [Copy(pool, 0, src_at, dst_at, many)]


@pytest.mark.parametrize(
    "runs",
    [
        one_run(-1, 0, 4), one_run(0, -1, 4), one_run(998, 0, 3), one_run(0, 998, 3),
        one_run(0, 0, 0), one_run(0, 0, -5), one_run(0, 0, 4, pool=3), one_run(0, 0, 1001),
        one_run(2**63 - 10, 0, 4096), one_run(0, 2**63 - 1, 2**62), one_run(5, 5, 2**63 - 1),
    ],
)  # fmt: skip
def test_ranges_outside_their_regions_are_refused(runs: list[Copy]) -> None:
    """Also where the sum of start and length is too large for its type."""
    with pytest.raises(AtlasError) as refusal:
        check_bounds(runs, REGIONS, REGIONS)
    assert refusal.value.code is Code.OUT_OF_BOUNDS


def test_ranges_up_to_the_edges_are_taken() -> None:
    check_bounds(one_run(0, 0, 1000) + one_run(999, 0, 1), REGIONS, REGIONS)


# -- messages -----------------------------------------------------------------------------

KEY = bytes(range(16))
SOME: list[say.Message] = [
    say.Open(session=KEY, way="pull", request="r", blocks={0: b""}, start=0, stop=9, seconds=1.0),
    say.Renew(session=KEY, lease=KEY, seconds=2.0),
    say.Gather(session=KEY, lease=KEY, start=0, stop=4096, slot=1),
    say.Sums(session=KEY, lease=KEY, start=0, stop=1 << 20, piece=4096),
    say.Close(session=KEY, lease=KEY, whole=True),
]


@pytest.mark.parametrize("message", SOME, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("secret", [None, b"", b"secret"])
def test_a_message_arrives_as_it_was_said(message: say.Message, secret: bytes | None) -> None:
    frames = say.seal(message, KEY, secret)
    assert say.unseal(frames, say.Question, secret) == (KEY, message)


@given(st.integers(0, 4), st.data())
def test_a_signed_message_cannot_be_changed(number: int, data: st.DataObject) -> None:
    frames = say.seal(SOME[number], KEY, b"secret")
    which = data.draw(st.integers(0, 1))
    at = data.draw(st.integers(0, len(frames[which]) - 1))
    changed = bytearray(frames[which])
    changed[at] ^= data.draw(st.integers(1, 255))
    frames[which] = bytes(changed)
    with pytest.raises(AtlasError) as refusal:
        say.unseal(frames, say.Question, b"secret")
    assert refusal.value.code is Code.BAD_SIGNATURE


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_any_frames_are_a_message_or_a_coded_refusal(frames: list[bytes]) -> None:
    for kind in (say.Question, say.Answer):
        with pytest.raises(AtlasError) as refusal:
            say.unseal(frames, kind, None)
        assert refusal.value.code in (Code.BAD_HANDSHAKE, Code.BAD_SIGNATURE)


@given(st.integers(0, 4), st.data())
def test_a_changed_message_is_another_or_a_coded_refusal(n: int, data: st.DataObject) -> None:
    payload = bytearray(say.seal(SOME[n], KEY, None)[1])
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(16, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        _, said = say.unseal([b"", bytes(payload)], say.Question, None)
    except AtlasError as refused:
        assert refused.code is Code.BAD_HANDSHAKE
    else:
        assert isinstance(said, say.Message)


@given(st.dictionaries(st.integers(0, 9), st.lists(st.integers(0, 2**32 - 1), max_size=20)))
def test_block_tables_travel(blocks: dict[int, list[int]]) -> None:
    back = say.unpack(say.pack(blocks))
    assert {group: ids.tolist() for group, ids in back.items()} == blocks


@pytest.mark.parametrize("nbytes", [1, 2, 3, 5, 4097])
def test_a_block_table_is_whole_numbers(nbytes: int) -> None:
    with pytest.raises(AtlasError) as refusal:
        say.unpack({0: bytes(nbytes)})
    assert refusal.value.code is Code.BAD_HANDSHAKE


@pytest.mark.parametrize("code", list(Code))
def test_every_refusal_reaches_the_peer_with_its_code(code: Code) -> None:
    said = say.refusal_of(AtlasError(code, "rule" * 2000, got={1: 2}, hint="hint"))
    _, back = say.unseal(say.seal(said, KEY, None), say.Answer, None)
    with pytest.raises(AtlasError) as refusal:
        say.raise_refusal(back)
    assert refusal.value.code is code


def test_a_refusal_of_a_later_version_is_still_one() -> None:
    said = say.Refusal(code="not_yet_thought_of", rule="r", got="g", hint="h")
    with pytest.raises(AtlasError) as refusal:
        say.raise_refusal(said)
    assert refusal.value.code is Code.WIRE_FAILED


def test_questions_and_answers_are_never_taken_for_each_other() -> None:
    """A message that is sent back to its sender means nothing."""
    tags = [
        {kind.__struct_config__.tag for kind in union.__args__}
        for union in (say.Question, say.Answer)
    ]
    assert not tags[0] & tags[1]
    for message in SOME:
        with pytest.raises(AtlasError):
            say.unseal(say.seal(message, KEY, None), say.Answer, None)


def test_a_message_holds_no_more_than_its_bytes() -> None:
    """No field allocates what a length in it claims: lengths are those of the message."""
    hollow = msgspec.msgpack.encode({"say": "renew"})[:-5] + b"\xdd\xff\xff\xff\xff"
    with pytest.raises(AtlasError) as refusal:
        say.unseal([b"", KEY + hollow], say.Question, None)
    assert refusal.value.code is Code.BAD_HANDSHAKE


# -- leases -------------------------------------------------------------------------------


def lease_of(leases: Leases, seconds: float = 60.0, **about: Any) -> Any:
    given: dict[str, Any] = {
        "session": KEY, "request": "r", "way": "pull", "peer_rank": 0, "whole": True,
        "copies": (), "slots": (),
    }  # fmt: skip
    return leases.add(seconds, **given | about)


def test_a_lease_is_found_by_its_own_session_while_it_is_held() -> None:
    ended: list[Any] = []
    leases = Leases(ended.append)
    held, over = lease_of(leases), lease_of(leases, 0.0)
    assert leases.find(held.key, KEY) is held
    for key, session in ((held.key, bytes(16)), (over.key, KEY), (bytes(16), KEY)):
        with pytest.raises(AtlasError) as refusal:
            leases.find(key, session)
        assert refusal.value.code is Code.LEASE_EXPIRED
    leases.sweep()
    assert ended == [over]
    leases.renew(held, 0.0)
    assert held.left > 50
    leases.drop(held)
    leases.drop(held)
    assert ended == [over, held]
    assert len(leases) == 0


def test_leases_of_a_request_end_one_way_only() -> None:
    leases = Leases(lambda _: None)
    pull, push, other = lease_of(leases), lease_of(leases, way="push"), lease_of(leases, request="")
    leases.drop_request("r", "pull")
    assert {one.key for one in leases._open.values()} == {push.key, other.key}
    assert pull.key not in leases._open
    leases.drop_all({bytes(16)})
    assert len(leases) == 2
    leases.drop_all({KEY})
    assert len(leases) == 0


def test_leases_are_bounded_in_number_and_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.wire.leases._MOST", 3)
    monkeypatch.setattr("kvatlas.wire.leases._MOST_RUNS", 10)
    leases = Leases(lambda _: None)
    six = (Copy(0, 0, *[np.arange(6)] * 3),)
    first = lease_of(leases, copies=six)
    with pytest.raises(AtlasError) as refusal:
        lease_of(leases, copies=six)
    assert refusal.value.code is Code.TOO_MANY
    leases.drop(first)
    for _ in range(3):
        lease_of(leases)
    with pytest.raises(AtlasError) as refusal:
        lease_of(leases)
    assert refusal.value.code is Code.TOO_MANY


def test_a_lease_does_not_end_while_bytes_are_copied_for_it() -> None:
    ended = threading.Event()
    leases = Leases(lambda _: ended.set())
    lease = lease_of(leases)
    with lease.guard:
        ending = threading.Thread(target=leases.drop, args=(lease,))
        ending.start()
        assert not ended.wait(0.05)
        with pytest.raises(AtlasError):
            leases.find(lease.key, KEY)
    ending.join(5)
    assert ended.is_set()


# -- transfers ----------------------------------------------------------------------------

STEPS = ["ok", "fail", "cancelled"]


@pytest.mark.parametrize("outcome", list(itertools.product(STEPS, repeat=3)))
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_transfer_is_ready_exactly_when_every_rank_has_delivered(
    outcome: tuple[str, ...], order: tuple[int, ...]
) -> None:
    transfer = Transfer("r", (4, 5, 6), 30)
    called_off = AtlasError(Code.CANCELLED, "rule", got="got", hint="hint")
    failed = False
    for step, rank in enumerate(order):
        assert not transfer.done
        assert not transfer.ready
        if outcome[rank] == "ok":
            transfer.add(4 + rank, 10)
            transfer.finished(4 + rank)
        else:
            transfer.failed(4 + rank, REFUSAL if outcome[rank] == "fail" else called_off)
            failed = True
        assert transfer.done is (step == 2)
        assert transfer.ready is (step == 2 and not failed)
        if failed:
            with pytest.raises(AtlasError) as refusal:
                transfer.refuse_cancelled()
            assert refusal.value.code is Code.CANCELLED
    if failed:
        with pytest.raises(AtlasError) as refusal:
            transfer.wait(1)
        right = Code.PEER_LOST if "fail" in outcome else Code.CANCELLED
        assert refusal.value.code is right
    else:
        assert transfer.wait(1).moved == 30


def test_too_few_bytes_are_never_ready() -> None:
    transfer = Transfer("r", (0, 1), 30)
    transfer.add(0, 10)
    transfer.finished(0)
    transfer.add(1, 10)
    transfer.finished(1)
    assert transfer.done
    assert not transfer.ready
    with pytest.raises(AtlasError) as refusal:
        transfer.wait(1)
    assert refusal.value.code is Code.WIRE_FAILED


def test_a_rank_that_starts_over_counts_from_nothing() -> None:
    transfer = Transfer("r", (0,), 30)
    transfer.add(0, 20)
    transfer.layer(0, "a")
    transfer.again(0)
    assert (transfer.moved, transfer.layers) == (0, set())
    transfer.add(0, 30)
    transfer.finished(0)
    assert transfer.ready


def test_a_transfer_of_no_ranks_is_over_at_once_and_others_wait() -> None:
    assert Transfer("r", (), 0).wait(0).ready
    with pytest.raises(AtlasError) as refusal:
        Transfer("r", (0,), 0).wait(0.01)
    assert refusal.value.code is Code.DEADLINE


def test_layers_are_those_of_every_rank() -> None:
    transfer = Transfer("r", (0, 1), None)
    transfer.layer(0, "a")
    assert transfer.layers == set()
    transfer.layer(1, "a")
    transfer.layer(1, "b")
    assert transfer.layers == {"a"}


def test_a_handle_that_never_ends_is_given_up() -> None:
    class Never(Handle):
        def poll(self) -> bool:
            return False

    Done().wait(0.0)
    with pytest.raises(AtlasError) as refusal:
        Never().wait(0.0)
    assert refusal.value.code is Code.DEADLINE


# -- metrics and the channel --------------------------------------------------------------


def test_metrics_are_what_prometheus_reads() -> None:
    metrics = Metrics()
    with ThreadsOf(8) as threads:
        threads.run(lambda: counted(metrics))
    with pytest.raises(ValueError, match="x"), metrics.phase("open"):
        raise ValueError("x")
    metrics.ended("pull", "ok")
    metrics.ended("pull", "deadline")
    assert metrics.values == {"bytes": 12000, "descriptors": 4000}
    assert metrics.seconds["open"] > 0
    line = re.compile(r'^(# TYPE \w+ counter|\w+(\{\w+="\w+"(,\w+="\w+")*\})? [0-9.]+)$')
    text = metrics.prometheus()
    assert text.endswith("\n")
    assert all(line.match(one) for one in text.splitlines())
    assert 'kvatlas_wire_transfers_total{way="pull",outcome="deadline"} 1' in text


def counted(metrics: Metrics) -> None:
    for _ in range(500):
        metrics.add(bytes=3, descriptors=1)


class ThreadsOf:
    """The same thing in several threads at once."""

    def __init__(self, many: int) -> None:
        self.many = many

    def __enter__(self) -> ThreadsOf:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, act: Any) -> None:
        threads = [threading.Thread(target=act) for _ in range(self.many)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def test_without_zeromq_a_wire_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(AtlasError) as refusal:
        zmq()
    assert refusal.value.code is Code.MISSING_EXTRA
    assert "kvatlas[wire]" in refusal.value.hint


def test_an_endpoint_that_is_none_is_refused() -> None:
    with pytest.raises(AtlasError) as refusal:
        ask("nowhere", SOME[1], secret=None, deadline=1e18)
    assert refusal.value.code is Code.WIRE_FAILED
