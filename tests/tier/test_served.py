"""One tier for many processes: what each stores all find, whoever dies, and nobody is believed."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvatlas import AtlasError
from kvatlas.errors import Code
from kvatlas.tier import Tier, TierClient, TierServer, file_owner, share_file, share_memory
from kvatlas.tier.blocks import StoreResult
from kvatlas.tier.served import messages as m
from kvatlas.tier.served import server as server_
from kvatlas.wire import make_transport, pools_for
from kvatlas.wire.connection import Connection
from kvatlas.wire.encoding import decode, encode
from kvatlas.wire.protocol import Refusal, SendPlan
from kvatlas.wire.unix_sockets import connect_to_path
from tests.planning.models import SMALL
from tests.profiles import DEEP
from tests.tier.world import World, small, tier_plan

ROOT = Path(__file__).parents[2]
MODEL = SMALL["dense"]
SRC = small(MODEL, tp=2, layout="LBNHC")
DST = small(MODEL, block_size=32, layout="BHLNC")


FIVE = ("delta hybrid", "dense", "sliding", "latent", "compressed")


@pytest.mark.parametrize(
    ("act", "about"),
    [
        ("together", FIVE if DEEP else FIVE[:1]),
        ("clients", ("100" if DEEP else "20", "11")),
        ("servers", ("100" if DEEP else "5", "11")),
    ],
)
def test_processes_at_once_read_no_wrong_byte_whoever_is_killed(
    act: str, about: tuple[str, ...], tmp_path: Path
) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.tier.served_processes", act, str(tmp_path / "t"), *about],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=1120 if DEEP else 320,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Tier, TierServer]]:
    path = tmp_path / "t"
    with Tier.open(path, tier_plan(MODEL), durable=False) as tier, TierServer(tier) as server:
        yield tier, server


def begin(client: TierClient, world: World, rank: int) -> Any:
    """What a rank is given to fill, as its client is told."""
    rows = world.keys(client)
    _, tables = world.holding(SRC, rank)
    about: Any = {"tokens": (0, world.tokens), "rows": rows, "blocks": tables}
    return client._begin(client.find_server(), SRC, rank=rank, **about)


def wait(what: Any) -> None:
    until = time.monotonic() + 20
    while not what():
        assert time.monotonic() < until
        time.sleep(0.002)


def test_a_row_is_found_when_the_clients_of_all_ranks_have_stored(tmp_path: Path) -> None:
    world = World(MODEL, 100)
    folder = tmp_path / ("a folder whose name is longer than sockets take" * 2)
    folder.mkdir()
    shares = [
        partial(share_file, folder / "t", tier_plan(MODEL), durable=False),
        partial(share_memory, folder / "m", tier_plan(MODEL)),
    ]
    for share in shares:
        with share() as one, share() as two:
            assert stat.S_IMODE(one.path.stat().st_mode) == 0o600
            assert world.store(one, SRC, [0]) == [StoreResult(0, 7, 0)]
            assert one.match(world.keys(one), 100) == two.match(world.keys(two), 100) == 0
            assert world.store(two, SRC, [1]) == [StoreResult(7, 0, 0)]
            assert one.match(world.keys(one), 100) == 100
            for client in (one, two):
                world.check(client, DST)
                world.check(client, SRC, (33, 70))
            key = world.keys(one)[0][0]
            assert (len(one), key in two, two.has(key), b"x" in two) == (7, True, True, False)
            assert two.drop(world.keys(two)) == 7
            assert len(one) == 0


def test_a_pin_is_joined_by_another_client_and_outlives_the_first(served: Any) -> None:
    tier, server = served
    world = World(MODEL, 100)
    world.store(tier, SRC)
    held, tables = {0: np.zeros(DST.pools[0].nbytes, np.uint8)}, list(range(4))
    with TierClient(server.path) as scheduler, TierClient(server.path) as worker:
        with scheduler.pin(world.keys(tier), 100) as hit:
            assert hit.tokens == 100
            joined = worker.join(hit.name)
            second = joined.__enter__()
        tier.drop(world.keys(tier))
        second.fetch(held, DST, blocks=tables)
        assert held[0].any()
        assert tier._index.free(0) < tier.plan.pools[0].blocks, "it is still there for this one"
        joined.__exit__(None, None, None)
        wait(lambda: tier._index.free(0) == tier.plan.pools[0].blocks)
        with pytest.raises(AtlasError) as refusal, worker.join(hit.name):
            pass
        assert refusal.value.code is Code.MISSING_BLOCKS


def test_what_a_client_was_filling_is_free_when_it_goes_and_was_never_found(served: Any) -> None:
    tier, server = served
    world = World(MODEL, 100)
    for _ in range(20):
        client = TierClient(server.path)
        given = begin(client, world, 0)
        assert len(given.fills) == 8 * 7
        pinned = client.pin([None] * 7, 0)
        pinned.__enter__()
        assert tier.match(world.keys(tier), 100) == 0
        client._attachment.close()  # type: ignore[union-attr]  # as when its process ends
        wait(lambda: not server.clients)
        wait(lambda: tier._index.free(0) == tier.plan.pools[0].blocks)
        assert not server._pins
    # Its rank stores again, and the row is there.
    with TierClient(server.path) as client:
        assert world.store(client, SRC) == [StoreResult(0, 7, 0), StoreResult(7, 0, 0)]
        world.check(client, DST)


def test_a_tier_that_is_gone_is_a_miss_and_found_again_when_it_is_back(tmp_path: Path) -> None:
    path, world = tmp_path / "t", World(MODEL, 100)
    tier = Tier.open(path, tier_plan(MODEL), durable=False)
    server = TierServer(tier)
    client = TierClient(server.path, timeout=2)
    world.store(client, SRC)
    keys = world.keys(client)
    pinned = client.pin(keys, 100)
    hit = pinned.__enter__()
    server.close()
    tier.close()
    begun = time.monotonic()
    assert client.match(keys, 100) == 0
    with client.pin(keys, 100) as nothing:
        assert nothing.tokens == 0
    assert len(client) == 0
    with pytest.raises(AtlasError) as refusal:
        world.store(client, SRC)
    assert refusal.value.code is Code.PEER_LOST
    held = {0: np.zeros(DST.pools[0].nbytes, np.uint8)}
    with pytest.raises(AtlasError):
        hit.fetch(held, DST, blocks=list(range(4)))
    assert not held[0].any(), "blocks that somebody else may have by now are not read"
    pinned.__exit__(None, None, None)
    assert time.monotonic() - begun < 10
    with Tier.open(path, durable=False) as tier, TierServer(tier):
        wait(lambda: client.match(keys, 100) == 100)
        world.check(client, DST)
    client.close()
    with pytest.raises(AtlasError, match="closed"):
        client.match(keys, 100)


def test_a_server_that_stands_still_is_a_miss_within_the_deadline(served: Any) -> None:
    tier, server = served
    world = World(MODEL, 100)
    client = TierClient(server.path)
    assert world.store(client, SRC, [0]) == [StoreResult(0, 7, 0)]
    go_on, answer = threading.Event(), server._server.answer

    def late(question: Any, caller: Any) -> Any:
        if not isinstance(question, m.Attach):
            go_on.wait(20)
        return answer(question, caller)

    server._server.answer = late
    begun = time.monotonic()
    client.find_server()._timeout = 0.3
    assert client.match(world.keys(client), 100) == 0
    client.find_server()._timeout = 0.3
    with pytest.raises(AtlasError) as refusal:
        world.store(client, SRC, [1])
    assert refusal.value.code is Code.DEADLINE
    assert time.monotonic() - begun < 10
    assert client.metrics.outcomes["match", "deadline"] == 1
    go_on.set()
    # What was carried out all the same belongs to a session that is used no more.
    wait(lambda: any(block.writing for block in tier._index._filling.values()))
    client.find_server()
    wait(lambda: not any(block.writing for block in tier._index._filling.values()))
    assert world.store(client, SRC, [1]) == [StoreResult(7, 0, 0)]
    world.check(client, DST)
    client.close()


def test_a_file_that_was_removed_and_made_anew_is_the_one_that_all_use(tmp_path: Path) -> None:
    path, world = tmp_path / "t", World(MODEL, 100)
    with share_file(path, tier_plan(MODEL)) as one, share_file(path) as other:
        world.store(one, SRC)
        path.unlink()
        with share_file(path, tier_plan(MODEL)) as new:
            for client in (new, one, other):
                assert client.match(world.keys(client), 100) == 0
            assert world.store(other, SRC) == [StoreResult(0, 7, 0), StoreResult(7, 0, 0)]
            for client in (one, new):
                world.check(client, DST)


def test_a_server_of_shared_memory_waits_for_what_clients_have_and_frees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can see whether they still use it: they say so, or it stays out of use."""
    plan, world = tier_plan(MODEL), World(MODEL, 100)
    tier = Tier(plan, pools_for(plan, 0, make_transport("shm")))
    every = plan.pools[0].blocks
    for ends in (True, False):
        monkeypatch.setattr(server_, "_CLOSE_SECONDS", 30.0 if ends else 0.1)
        server = TierServer(tier, tmp_path / f"{ends}")
        client, late = TierClient(server.path), TierClient(server.path)
        begun = begin(client, world, 0)
        closing = threading.Thread(target=server.close)
        closing.start()
        wait(lambda: server._closing)  # noqa: B023
        if ends:
            assert late.match(world.keys(tier), 100) == 0
            with pytest.raises(AtlasError) as refusal:
                world.store(late, SRC)
            assert refusal.value.code is Code.PEER_LOST
            at = client.find_server()
            at.ask(m.EndStore, store=begun.store, brought=False, sums=())
        closing.join(20)
        assert not closing.is_alive()
        assert tier._index.free(0) == (every if ends else every - 7)
        client.close()
        late.close()
    tier.close()


def test_the_next_owner_of_a_file_waits_for_who_still_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_owner, "_WAIT_SECONDS", 0.1)
    path = tmp_path / "t"
    tier = Tier.open(path, tier_plan(MODEL))
    server = TierServer(tier)
    client = TierClient(server.path)
    at = client._attachment
    assert at is not None
    writing = at.moving()
    writing.__enter__()  # the server ends while this client writes to a block
    server.close()
    tier.close()
    with pytest.raises(AtlasError) as refusal:
        Tier.open(path)
    assert refusal.value.code is Code.TWICE
    with pytest.raises(AtlasError, match="disconnected"):
        writing.__exit__(None, None, None)
    again = Tier.open(path)
    with TierServer(again), pytest.raises(AtlasError, match="disconnected"), at.moving():
        pytest.fail("blocks of the last server are not used under the next")
    again.close()
    client.close()


def test_blocks_of_a_server_that_closes_are_free_when_no_client_fills_them_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_owner, "_WAIT_SECONDS", 0.1)
    tier, world = Tier.open(tmp_path / "t", tier_plan(MODEL)), World(MODEL, 100)
    every = tier.plan.pools[0].blocks
    for quiet in (True, False):
        server = TierServer(tier)
        client = TierClient(server.path)
        begin(client, world, 0)
        at = client.find_server()
        writing = at.moving()
        if not quiet:
            writing.__enter__()
        server.close()
        assert tier._index.free(0) == (every if quiet else every - 7)
        if not quiet:
            with pytest.raises(AtlasError, match="disconnected"):
                writing.__exit__(None, None, None)
        client.close()
    tier.close()


def test_two_that_store_the_same_at_once_leave_one_block_of_each(served: Any) -> None:
    tier, server = served
    world = World(MODEL, 100)
    clients = [TierClient(server.path) for _ in range(3)]
    plans = [(SRC, 0), (SRC, 1), (DST, 0)]
    threads = [
        threading.Thread(target=world.store, args=(client, made, [rank]))
        for client, (made, rank) in zip(clients, plans, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tier) == 7
    world.check(clients[0], DST)
    for client in clients:
        client.close()
    wait(lambda: tier._index.free(0) == tier.plan.pools[0].blocks - 7)


def test_wrong_messages_are_refused_and_harm_nobody(served: Any) -> None:
    tier, server = served
    world = World(MODEL, 100)
    world.store(tier, SRC)
    keys = world.keys(tier)
    client = TierClient(server.path)
    at = client._attachment
    assert at is not None

    def code_of(kind: Any, **about: Any) -> Code:
        with pytest.raises(AtlasError) as refusal:
            at.ask(kind, **about)
        return refusal.value.code

    row = {0: tuple(b"k%d" % entry for entry in range(7))}
    assert code_of(m.MatchKeys, keys={9: (b"k",)}, start=0, stop=9) is Code.OUT_OF_RANGE
    assert code_of(m.MatchKeys, keys=row, start=9, stop=3) is Code.BAD_TOKENS
    assert code_of(m.MatchKeys, keys=row, start=0, stop=1 << 40) is Code.BAD_TOKENS
    assert code_of(m.MatchKeys, keys={0: (b"",)}, start=0, stop=9) is Code.BAD_HANDSHAKE
    assert code_of(m.PinKeys, keys=row, start=-1, stop=9) is Code.BAD_HANDSHAKE
    assert code_of(m.JoinPin, pin=bytes(16)) is Code.MISSING_BLOCKS
    assert code_of(m.EndStore, store=bytes(16), brought=True) is Code.BAD_HANDSHAKE
    assert code_of(m.LearnPlan, plan=b"{}") is Code.BAD_HANDSHAKE
    store: Any = {"keys": row, "start": 0, "stop": 100, "blocks": {0: b"\0" * 28}}
    assert type(at.ask(m.BeginStore, plan=bytes(32), rank=0, **store)) is SendPlan
    begin(client, World(MODEL, 100, seed=2), 0)
    digest = client._told(SRC)[1]
    assert code_of(m.BeginStore, plan=digest, rank=7, **store) is Code.BAD_RANK
    assert code_of(m.BeginStore, plan=digest, rank=0, **store | {"blocks": {0: b"\0"}}) is (
        Code.BAD_HANDSHAKE
    )
    begun = at.ask(m.BeginStore, plan=digest, rank=0, **store)
    assert len(begun.fills) == 8 * 7
    wrong = (m.SummedPart(0, 10_000, 1, 1),)
    about: Any = {"store": begun.store, "brought": True, "sums": wrong}
    assert code_of(m.EndStore, **about) is Code.BAD_HANDSHAKE
    assert code_of(m.EndStore, **about) is Code.BAD_HANDSHAKE, "it has ended"
    at._session = bytes(16)
    assert code_of(m.MatchKeys, keys=row, start=0, stop=9) is Code.UNKNOWN_SESSION
    with pytest.raises(AtlasError) as refusal:
        client._filled([], np.array([[0, 1]], "<u4").tobytes())
    assert refusal.value.code is Code.BAD_HANDSHAKE
    for said in (b"\0\0\0\4what", b"\xff" * 64, b"\0\0\0\0"):
        with connect_to_path(server.path, 5) as raw:
            raw.sendall(said)
            assert raw.recv(1 << 16), "a refusal"
    with connect_to_path(server.path, 5) as raw:
        connection, until = Connection(raw), time.monotonic() + 5
        for version, refused in ((m.VERSION + 1, True), (m.VERSION, False), (m.VERSION, True)):
            connection.send(encode(m.Attach(version=version)), until)
            answer = decode(connection.receive(until), m.TierAnswer)
            assert isinstance(answer, Refusal) is refused
    client.close()
    wait(lambda: not server.clients)
    assert tier.match(keys, 100) == 100
    assert tier._index.free(0) == tier.plan.pools[0].blocks - 7
    world.check(tier, DST)


def test_another_users_socket_and_a_file_that_was_exchanged_are_not_used(
    served: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tier, server = served
    with monkeypatch.context() as patched:
        patched.setattr("os.geteuid", lambda: os.getuid() + 1)
        with pytest.raises(AtlasError, match="another user"):
            TierClient(server.path)
    Tier.open(tmp_path / "other", tier_plan(MODEL)).close()
    (tmp_path / "other").replace(tier.file.path)
    with pytest.raises(AtlasError, match="no longer refers"):
        TierClient(server.path)
    with pytest.raises(AtlasError, match="requires a socket path"):
        TierServer(Tier(tier_plan(MODEL)))
    with pytest.raises(AtlasError, match="not in shared memory"):
        TierServer(Tier(tier_plan(MODEL)), tmp_path / "m")
