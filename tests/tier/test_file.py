"""Files: opened again, opened twice, cut short, flipped, forged."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from examples import tier_file

from kvatlas import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.tier import Tier
from kvatlas.tier import format as format_
from kvatlas.tier.blocks import StoreResult, TierBlock
from kvatlas.tier.format import PAGE, RECORD, Extent, header
from tests.planning.models import ATTENTION, DELTA, SMALL, model_of
from tests.tier.world import World, pools, small, tier_plan

TINY = model_of("tiny", DELTA, ATTENTION)
TOKENS = 40


def tiny_plan() -> Plan:
    return tier_plan(TINY, max_len=64, memory="48KiB", states="apart")


def code_of(act: Any) -> Code:
    with pytest.raises(AtlasError) as refusal:
        act()
    return refusal.value.code


class Sample:
    """A small file with a request in it, and what a load of that should give."""

    def __init__(self, path: Path) -> None:
        self.world = World(TINY, TOKENS)
        self.path = path
        self.made = small(TINY, max_len=64, states="apart")
        with Tier.open(path, tiny_plan()) as tier:
            self.world.store(tier, self.made)
            self.keys = self.world.keys(tier)
            assert tier.match(self.keys, TOKENS) == TOKENS
            self.plan = tier.plan
        self.good = path.read_bytes()
        self.extent = Extent(self.plan, len(self.plan.to_json()))
        self.tables = {0: [3, 1, 2], 1: [0]}
        self.before = pools(self.made, 0, 7)
        self.expected: dict[int, dict[int, Any]] = {}
        for tokens in (16, 32, TOKENS):
            self.expected[tokens] = pools(self.made, 0, 7)
            self.world.put(self.made, 0, self.expected[tokens], self.tables, tokens)

    def serves(self, text: bytes, verify: Any = "once") -> int:
        """How many tokens a damaged file serves; each of their bytes must be right."""
        self.path.write_bytes(text)
        with Tier.open(self.path, verify=verify) as tier, tier.pin(self.keys, TOKENS) as hit:
            got = pools(self.made, 0, 7)
            hit.fetch(got, self.made, blocks=self.tables)
            expected = self.expected[hit.tokens] if hit.tokens else self.before
            assert all(np.array_equal(got[i], expected[i]) for i in got)
            return hit.tokens


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return Sample(tmp_path_factory.mktemp("tier") / "tier")


def flipped(text: bytes, place: int, bit: int) -> bytes:
    damaged = bytearray(text)
    damaged[place] ^= 1 << bit
    return bytes(damaged)


# -- opening again ------------------------------------------------------------------------


def test_what_was_stored_is_there_again_and_goes_on(tmp_path: Path) -> None:
    dense = SMALL["dense"]
    made, world, other = small(dense, tp=2), World(dense, 100), World(dense, 64, seed=5)
    with Tier.open(tmp_path / "t", tier_plan(dense)) as tier:
        world.store(tier, made)
        world.store(tier, made, ranks=[0], keys=world.keys(tier, salt="half"))
        assert len(tier) == 7
    for _ in range(2):
        with Tier.open(tmp_path / "t", tier_plan(dense)) as tier:
            assert len(tier) == 7
            assert tier.match(world.keys(tier, salt="half"), 100) == 0
            world.check(tier, small(dense))
    with Tier.open(tmp_path / "t", durable=False) as tier:
        other.store(tier, made, keys=other.keys(tier, salt="other"))
        assert tier._index.sequence == 7 + 4
    with Tier.open(tmp_path / "t") as tier:
        other.check(tier, made, keys=other.keys(tier, salt="other"))
        world.check(tier, made)
        tier.drop(world.keys(tier))
    with Tier.open(tmp_path / "t") as tier:
        assert len(tier) == 4
        assert tier.match(world.keys(tier), 100) == 0


@pytest.mark.parametrize("durable", [True, False])
def test_what_is_dropped_from_a_durable_file_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, durable: bool
) -> None:
    dense, flushed, flush = SMALL["dense"], [], os.fdatasync
    world = World(dense, 64)

    def watched(descriptor: int) -> None:
        _, blocks = tier_file.read(tmp_path / "t")
        flushed.append(len(blocks))
        flush(descriptor)

    with Tier.open(tmp_path / "t", tier_plan(dense), durable=durable) as tier:
        world.store(tier, small(dense))
        monkeypatch.setattr(os, "fdatasync", watched)
        assert tier.drop(world.keys(tier)) == 4
        assert tier.drop(world.keys(tier)) == 0
    assert flushed == ([0] if durable else [])  # the records were cleared before


def test_evicted_and_replaced_blocks_stay_away(tmp_path: Path) -> None:
    dense = SMALL["dense"]
    made, world = small(dense), World(dense, 60)
    with Tier.open(tmp_path / "t", tier_plan(dense, max_len=64, memory=5 * 8192)) as tier:
        world.store(tier, made, tokens=50)
        world.store(tier, made, tokens=60, keys=world.keys(tier, 50))
        one: dict[str, Any] = {"blocks": [9], "tokens": 16, "keys": [b"new"]}
        for _ in range(3):
            tier.store(pools(made, 0, 3), made, **one)
        left = tier.names()
    with Tier.open(tmp_path / "t") as tier:
        assert sorted(tier.names()) == sorted(left)
        keys = world.keys(tier, 50)
        assert tier.match(keys, 60) == 60


def test_of_two_records_for_one_key_the_later_counts(sample: Sample, tmp_path: Path) -> None:
    """A process can die between writing a new block and clearing the one that it replaces."""
    path = tmp_path / "two"
    with Tier.open(path, tiny_plan()) as tier:
        file = tier._file
        assert file is not None
        sample.world.store(tier, sample.made)
        group, key = next(name for name in tier.names() if name[0] == 0)
        block = tier._index._whole[group, key]
        later = TierBlock(block.pool, tier._index._free[block.pool][0], group, key, block.cover)
        nbytes = tier.plan.pools[block.pool].block_bytes
        with path.open("r+b") as raw:
            raw.seek(sample.extent.pools[block.pool] + block.block_id * nbytes)
            text = raw.read(nbytes)
            raw.seek(sample.extent.pools[block.pool] + later.block_id * nbytes)
            raw.write(text)
        later.sequence = 1000
        file.commit([later])
        count = len(tier)
    for _ in range(2):
        with Tier.open(path) as tier:
            assert len(tier) == count
            assert tier._index._whole[group, key].block_id == later.block_id
            sample.world.check(tier, sample.made)


def test_the_second_to_open_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    code = (
        "import sys; from kvatlas import AtlasError; from kvatlas.tier import Tier\n"
        "try: Tier.open(sys.argv[1]); print('opened')\n"
        "except AtlasError as refusal: print(refusal.code)"
    )

    def elsewhere() -> str:
        run = subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
        )
        return run.stdout.strip()

    with Tier.open(path, tiny_plan()):
        assert code_of(lambda: Tier.open(path)) == Code.TWICE
        assert elsewhere() == "twice"
    assert elsewhere() == "opened"
    Tier.open(path).close()


def test_another_plan_is_refused(tmp_path: Path) -> None:
    Tier.open(tmp_path / "t", tiny_plan()).close()
    other = tier_plan(TINY, max_len=64, memory="64KiB", states="apart")
    assert code_of(lambda: Tier.open(tmp_path / "t", other)) == Code.BAD_PLAN
    assert code_of(lambda: Tier.open(tmp_path / "no", small(TINY, tp=2))) == Code.BAD_PLAN
    assert not (tmp_path / "no").exists()


def test_files_that_cannot_be(tmp_path: Path) -> None:
    assert code_of(lambda: Tier.open(tmp_path / "nothing")) == Code.UNREADABLE
    assert code_of(lambda: Tier.open(tmp_path)) == Code.UNREADABLE
    assert code_of(lambda: Tier.open(tmp_path / "no" / "t", tiny_plan())) == Code.UNREADABLE
    vast = tier_plan(SMALL["dense"], memory=1 << 50, block_size=1 << 20, max_len=1 << 20)
    assert code_of(lambda: Tier.open(tmp_path / "t", vast)) == Code.NOT_ENOUGH_MEMORY
    many = tier_plan(SMALL["dense"], memory=1 << 55)
    assert code_of(lambda: Tier.open(tmp_path / "t", many)) == Code.TOO_MANY
    assert not (tmp_path / "t").exists()
    assert not list(tmp_path.iterdir()), "what could not be created left nothing"
    Tier.open(tmp_path / "t", tiny_plan()).close()
    assert list(tmp_path.iterdir()) == [tmp_path / "t"]


# -- damage -------------------------------------------------------------------------------


def test_a_sound_file_serves_everything(sample: Sample) -> None:
    assert sample.serves(sample.good) == TOKENS


def test_cut_short_or_too_long(sample: Sample) -> None:
    extent, size = sample.extent, len(sample.good)
    starts = [*extent.pools.values(), extent.index, PAGE, PAGE + len(sample.plan.to_json())]
    edges = {0, 1, 8, 12, size - 1, size - RECORD}
    edges |= {start + near for start in starts for near in (-1, 0, 1)}
    edges |= set(range(extent.index, size, RECORD))
    for length in sorted(edges):
        assert length < size
        sample.path.write_bytes(sample.good[:length])
        assert code_of(lambda: Tier.open(sample.path)) in (Code.UNREADABLE, Code.CHECKSUM)
    sample.path.write_bytes(sample.good + b"\x00")
    assert code_of(lambda: Tier.open(sample.path)) == Code.UNREADABLE


def test_flips_in_the_header_and_the_plan(sample: Sample) -> None:
    text = len(sample.plan.to_json())
    places = [*range(format_._HEADER.size), *range(PAGE - 20, PAGE), 2000]
    places += range(PAGE, PAGE + text, max(1, text // 60))
    codes = set()
    for place in places:
        sample.path.write_bytes(flipped(sample.good, place, place % 8))
        codes.add(code_of(lambda: Tier.open(sample.path)))
    assert codes == {Code.UNREADABLE, Code.CHECKSUM, Code.UNLIKE_VERSIONS}


def rows_in_use(sample: Sample) -> Iterator[tuple[int, int, int]]:
    """(number in the file, first byte, bytes) of every block that is whole."""
    for pool in sample.plan.pools:
        for block in range(pool.blocks):
            number = sample.extent.numbers[pool.index] + block
            record = sample.good[sample.extent.index + number * RECORD :][:RECORD]
            if any(record):
                start = sample.extent.pools[pool.index] + block * pool.block_bytes
                yield number, start, pool.block_bytes


def test_flips_in_the_index_make_a_block_absent(sample: Sample) -> None:
    for number, _, _ in rows_in_use(sample):
        for byte in range(0, RECORD, 5):
            place = sample.extent.index + number * RECORD + byte
            assert sample.serves(flipped(sample.good, place, byte % 8)) < TOKENS


def test_flips_in_the_data_are_never_served(sample: Sample) -> None:
    rng = np.random.default_rng(0)
    for _, start, nbytes in rows_in_use(sample):
        for place in [start, start + nbytes - 1, *(start + rng.integers(0, nbytes, 12))]:
            damaged = flipped(sample.good, int(place), int(rng.integers(8)))
            assert sample.serves(damaged) < TOKENS


def test_a_damaged_block_is_gone_for_good_and_can_be_stored_again(sample: Sample) -> None:
    _, start, _ = next(rows_in_use(sample))
    sample.path.write_bytes(flipped(sample.good, start, 0))
    with Tier.open(sample.path) as tier:
        count = len(tier)
        with tier.pin(sample.keys, TOKENS) as hit:
            assert hit.tokens < TOKENS
        assert len(tier) == count - 1
        assert tier.metrics.values["damaged"] == 1
        sample.world.store(tier, sample.made)
        sample.world.check(tier, sample.made)
    with Tier.open(sample.path) as tier:
        assert len(tier) == count
        sample.world.check(tier, sample.made)


def test_verified_always_sees_damage_while_open(sample: Sample) -> None:
    sample.path.write_bytes(sample.good)
    _, start, _ = next(rows_in_use(sample))
    with Tier.open(sample.path, verify="always") as tier:
        with tier.pin(sample.keys, TOKENS) as hit:
            assert hit.tokens == TOKENS
        with sample.path.open("r+b") as file:
            file.seek(start)
            file.write(bytes([sample.good[start] ^ 1]))
        with tier.pin(sample.keys, TOKENS) as hit:
            assert hit.tokens < TOKENS


def test_blocks_and_records_of_another_place_are_not_believed(sample: Sample) -> None:
    """A record is bound to its block and to its file."""
    numbers = [number for number, _, _ in rows_in_use(sample)]
    moved = bytearray(sample.good)
    one, two = (sample.extent.index + number * RECORD for number in numbers[:2])
    moved[one : one + RECORD] = sample.good[two : two + RECORD]
    assert sample.serves(bytes(moved)) < TOKENS
    fresh = sample.path.with_name("fresh")
    Tier.open(fresh, sample.plan).close()
    stolen = bytearray(fresh.read_bytes())
    stolen[sample.extent.index :] = sample.good[sample.extent.index :]
    assert sample.serves(bytes(stolen)) == 0


# -- forgeries: everything signed as it should be, and wrong ------------------------------

RECORDS: list[dict[str, int]] = [
    {"group": 2},
    {"group": 2**32 - 1},
    {"length": 0},
    {"length": 65},
    {"length": 2**32 - 1},
    {"sequence": 0},
    {"sequence": 2**64 - 1},
    {"block": 10**6},
    {"first": 2**63, "stop": 2**64 - 1},
    {"first": 5, "stop": 5},
    {"stop": 17},
    {"stop": 2**64 - 1},
]


@pytest.mark.parametrize("wrong", RECORDS, ids=str)
def test_records_that_say_what_cannot_be(sample: Sample, wrong: dict[str, int]) -> None:
    number = min(number for number, _, _ in rows_in_use(sample))
    place = sample.extent.index + number * RECORD
    said = sample.good[place : place + format_._RECORD.size]
    names = ("mark", "group", "length", "checksum", "sequence", "block", "first", "stop", "key")
    about = dict(zip(names, format_._RECORD.unpack(said), strict=True)) | wrong
    forged = format_._RECORD.pack(*about.values())
    identity = format_._HEADER.unpack_from(sample.good)[5]
    digest = hashlib.blake2b(forged, digest_size=16, key=identity).digest()
    text = sample.good[:place] + forged + digest + sample.good[place + RECORD :]
    assert sample.serves(text) < TOKENS


def forged_plan(sample: Sample, text: bytes, length: int | None = None) -> bytes:
    extent = sample.extent
    made = bytearray(header(text, bytes(16), extent))
    if length is not None:
        fields = list(format_._HEADER.unpack_from(made))
        fields[3] = length
        format_._HEADER.pack_into(made, 0, *fields)
    return bytes(made) + text + bytes(max(0, extent.nbytes - PAGE - len(text)))


def test_plans_that_cannot_be(sample: Sample) -> None:
    told = msgspec.json.decode(sample.plan.to_json())
    region = told["regions"][0]
    many = {**told, "regions": [{**region, "layers": region["layers"] * 20_000}]}
    texts: list[tuple[bytes, Code]] = [
        (b"", Code.UNREADABLE),
        (b"no JSON", Code.BAD_PLAN),
        (b"[" * 100_000, Code.BAD_PLAN),
        (msgspec.json.encode({**told, "tp": 10**9}), Code.BAD_PLAN),
        (msgspec.json.encode({**told, "regions": []}), Code.BAD_PLAN),
        (msgspec.json.encode(many), Code.BAD_PLAN),
        (small(TINY, tp=2).to_json(), Code.CHECKSUM),
        (small(TINY, memory=1 << 60).to_json(), Code.BAD_PLAN),
        (b'{"version":3,' + tiny_plan().to_json()[1:], Code.UNLIKE_VERSIONS),
    ]
    for text, code in texts:
        sample.path.write_bytes(forged_plan(sample, text))
        assert code_of(lambda: Tier.open(sample.path)) == code
    for length in (1 << 40, 2**64 - 1, 0):
        sample.path.write_bytes(forged_plan(sample, b"{}", length))
        assert code_of(lambda: Tier.open(sample.path)) == Code.UNREADABLE


def test_a_plan_that_is_no_tiers(sample: Sample) -> None:
    """All of the file in order, for a plan of two ranks."""
    text = small(TINY, tp=2).to_json()
    extent = Extent(Plan.from_json(text), len(text))
    made = header(text, bytes(16), extent) + text
    sample.path.write_bytes(made + bytes(extent.nbytes - len(made)))
    assert code_of(lambda: Tier.open(sample.path)) == Code.BAD_PLAN
    sample.path.write_bytes(sample.good)
    Tier.open(sample.path).close()


def test_a_commit_that_fails_leaves_the_key_absent(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Tier.open(tmp_path / "t", tiny_plan()) as tier:

        def full(_: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "fdatasync", full)
            with pytest.raises(AtlasError) as refusal:
                sample.world.store(tier, sample.made)
            assert refusal.value.code is Code.NOT_ENOUGH_MEMORY
        assert len(tier) == 0
        assert tier._index.free(0) == tier.plan.pools[0].blocks
        assert isinstance(sample.world.store(tier, sample.made)[0], StoreResult)
        sample.world.check(tier, sample.made)


def test_an_interrupt_is_raised_once_nobody_writes_any_more(tmp_path: Path) -> None:
    """What others still wrote would land in blocks that belong to somebody else by then."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    ended: list[int] = []

    def act(number: int) -> None:
        time.sleep(0.3)
        ended.append(number)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with Tier.open(tmp_path / "tier", tiny_plan()) as tier:
            assert tier.file is not None
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                tier.file._on_cores(act, list(range(12)))
            there = list(ended)
            assert 0 < len(there) < 12
            time.sleep(0.6)
            assert ended == there
    finally:
        signal.signal(signal.SIGALRM, before)
