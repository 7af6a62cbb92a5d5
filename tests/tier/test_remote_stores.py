"""S3 (moto's server) and Redis, directly and through a proxy that disturbs connections."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from kvatlas import AtlasError, Code
from kvatlas.errors import MissingExtraError
from kvatlas.models import CacheIdentity
from kvatlas.tier import ObjectStore, StoreTier, open_store, open_tier
from tests.profiles import DEEP
from tests.tier.lying_store import fetched
from tests.tier.store_servers import FAULTS, LOADING, UNAVAILABLE, Proxy, missing, running
from tests.tier.test_topologies import MODELS
from tests.tier.world import World, small, tier_plan

TIMES = 100 if DEEP else 1
TIMEOUT = 3.0 if DEEP else 1.0
MODEL = MODELS["dense"]
OURS = CacheIdentity(weights="ours")
CLIENTS = {"s3": "obstore", "redis": "redis"}
"""The module that each kind of store needs."""
LATE = 5.0
"""Seconds that a busy machine may add to a timeout."""


@pytest.fixture(scope="module", params=["s3", "redis"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, int]]:
    if why := missing(request.param):
        pytest.skip(why)
    with running(request.param, tmp_path_factory.mktemp("server")) as port:
        yield request.param, port


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")


def address(store: str, port: int, **options: object) -> str:
    more = "".join(f"&{name}={value}" for name, value in options.items())
    if store == "redis":
        return f"redis://127.0.0.1:{port}/0?{more[1:]}"
    return f"s3://bucket/a/prefix?region=us-east-1&endpoint=http://127.0.0.1:{port}{more}"


def test_every_method_of_a_store(server: tuple[str, int]) -> None:
    with closing(open_store(address(*server, timeout=30))) as store:
        check_store(store)


def check_store(store: ObjectStore) -> None:
    wanted = np.arange(5000, dtype=np.uint64).view(np.uint8)
    name, got = "kv2/t/n/key/0.0-64/0", np.zeros_like(wanted)
    assert store.put([]) == store.get([]) == store.exists([]) == []
    assert (
        store.put([(name, [wanted[:64], wanted[64:]]), ("kv2/t/marks/m", [wanted])]) == [True] * 2
    )
    assert store.put([(name, [wanted[:100]])]) == [True]
    assert store.size(name) == wanted.nbytes, "a second put does not change an object"
    assert store.get([(name, [got[:10], got[10:]]), ("kv2/t/no", [got[:9]])]) == [40_000, -1]
    assert np.array_equal(got, wanted)
    assert store.get([(name, [got[:100]])]) == [40_000]
    some = np.zeros(64, np.uint8)
    assert store.ranges(name, [(8, some[:32]), (39_990, some[32:])]) == 42
    assert np.array_equal(some[:42], np.concatenate([wanted[8:40], wanted[39_990:]]))
    assert store.ranges(name, [(40_000, some)]) == 0
    assert (store.ranges("kv2/t/no", [(0, some)]), store.size("kv2/t/no")) == (-1, -1)
    assert store.exists([name, "kv2/t/no", "kv2/t/marks/m"]) == [True, False, True]
    others = ["kv2/t/n/key/0.0-64/1", "kv2/t/n/key2/0.0-64/0", "kv2/t2/n/key/0.0-64/0"]
    assert store.put([(other, [wanted]) for other in others]) == [True] * 3
    assert sorted(store.names("kv2/t/n/key/")) == [name, others[0]]
    assert sorted(store.names("kv2/t/")) == sorted([name, *others[:2], "kv2/t/marks/m"])
    assert len(list(store.names())) == store.capacity().objects == 5
    assert store.remove([name, "kv2/t/no"]) == 1
    assert store.remove_all("kv2/t/n/key/") == 1
    assert store.remove_all("kv2/t/") == 2
    assert list(store.names()) == [others[2]]
    assert store.remove_all("") == 1
    assert store.sweep() == 0


def test_topologies_share_rows_and_a_dropped_key_is_gone(server: tuple[str, int]) -> None:
    world, src, dst = World(MODEL, 70), small(MODEL, tp=2), small(MODEL, layout="LBNHC")
    where, rows = address(*server, timeout=30), tier_plan(MODEL)
    with StoreTier(open_store(where), rows, OURS, staging=1 << 16, timeout=60.0) as tier:
        world.store(tier, src)
        with StoreTier(open_store(where), rows, OURS, staging=1 << 16, timeout=60.0) as other:
            world.check(other, dst)
        keys = world.keys(tier)
        assert tier.drop({0: keys[0][4:]}) == 4
        assert tier.match(keys, 70) == 64
        assert tier.drop_tenant() > 0
        assert tier.match(keys, 70) == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_disturbed_connection_leads_to_misses_and_never_to_a_wrong_byte(
    server: tuple[str, int], fault: str
) -> None:
    store, port = server
    proxy = Proxy(port, UNAVAILABLE if store == "s3" else LOADING)
    world, src, dst = World(MODEL, 40), small(MODEL, tp=2), small(MODEL, layout="LBNHC")
    opened = open_store(address(store, proxy.port, timeout=10))
    with StoreTier(opened, tier_plan(MODEL), OURS, staging=1 << 16, timeout=TIMEOUT) as tier:
        for turn in range(TIMES):
            proxy.set(fault, share=(1.0, 0.6, 0.3)[turn % 3])
            for act in (lambda: world.store(tier, src), lambda: fetched(world, tier, dst)):
                begun = time.monotonic()
                act()
                # Each rank stores once, or looks up and fetches once.
                assert time.monotonic() - begun < 2 * TIMEOUT + LATE
            assert proxy.disturbed or turn % 3, "every connection is disturbed"
        proxy.set("")
        tier.timeout, end = 60.0, time.monotonic() + 100
        while not (world.store(tier, src)[-1].whole == 3 and fetched(world, tier, dst)):
            assert time.monotonic() < end, "the tier works again after the fault"
        tier.drop_tenant()
    proxy.close()


@pytest.mark.parametrize("store", ["s3", "redis"])
def test_a_server_that_is_not_there_is_a_miss_and_an_error_of_the_store(store: str) -> None:
    pytest.importorskip(CLIENTS[store])
    where = address(store, 9, timeout=1)
    with closing(open_store(where)) as opened, pytest.raises(AtlasError) as refusal:
        opened.exists(["kv2/a"])
    assert refusal.value.code is Code.WIRE_FAILED
    with open_tier(where, MODEL, OURS, block_size=16, staging=1 << 16) as tier:
        assert tier.match([b"key"], 16) == 0
        assert dict(tier.misses) == {"failed": 1}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "where", ["s3://bucket?no_such_option=1", "s3://bucket?timeout=soon", "redis://h:1?x=1"]
)
def test_addresses_with_unknown_options_are_refused(where: str) -> None:
    pytest.importorskip(CLIENTS[where.split(":")[0]])
    with pytest.raises(AtlasError) as refusal:
        open_store(where)
    assert not isinstance(refusal.value, MissingExtraError)


FORKED = """
import os, signal, sys
from kvatlas import AtlasError
from kvatlas.tier import open_store
store = open_store(sys.argv[1])

def codes():
    for names in (["kv2/a"], ["kv2/a", "kv2/b"]):
        try:
            store.exists(names)
        except AtlasError as refusal:
            yield "forked" if "forked" in str(refusal) else refusal.code.value

if sys.argv[2] == "used":
    list(codes())
child = os.fork()
if not child:
    signal.alarm(30)  # the default action ends a child that hangs
    print(*codes(), flush=True)
    store.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(*codes())
store.close()
"""


@pytest.mark.parametrize(("use", "said"), [("used", "forked"), ("unused", "wire_failed")])
def test_no_call_of_a_bucket_hangs_in_a_forked_child(use: str, said: str) -> None:
    pytest.importorskip("obstore")
    command = [sys.executable, "-c", FORKED, address("s3", 9, timeout=1), use]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ran.stdout.split() == [said] * 2 + ["wire_failed"] * 2, ran.stderr


@pytest.mark.parametrize("names", [["kv2/a"], ["kv2/a", "kv2/b"]])
def test_an_error_without_text_is_an_error_of_the_store(
    monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    obstore = pytest.importorskip("obstore")
    monkeypatch.setattr(obstore, "head", lambda *_: (_ for _ in ()).throw(OSError()))
    with closing(open_store(address("s3", 9, timeout=1))) as store:
        with pytest.raises(AtlasError, match="OSError") as refusal:
            store.exists(names)
        assert refusal.value.code is Code.WIRE_FAILED


def test_a_closed_bucket_starts_no_threads() -> None:
    pytest.importorskip("obstore")
    store = open_store(address("s3", 9, timeout=1))
    store.close()
    with pytest.raises(AtlasError, match="closed"):
        store.exists(["kv2/a", "kv2/b"])
