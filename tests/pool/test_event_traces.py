"""Traces from an engine's events: requests as they were, what is unknown said, lies refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from kvatlas.errors import AtlasError, Code
from kvatlas.pool import (
    AllBlocksCleared,
    BlockEvent,
    BlockPool,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventRecording,
    PrefixIdentity,
    ReceivedBatch,
)
from kvatlas.pool.event_recording import FIRST_LINE
from kvatlas.simulate import Trace, read_trace, simulate
from kvatlas.simulate.traces import event_trace, stored_blocks
from kvatlas.simulate.traces.content_ids import ids_of
from kvatlas.simulate.traces.event_trace import EventTraceBuilder
from kvatlas.simulate.traces.trace import Unseen
from tests.pool.models import small_plan

BLOCK = 16


def stored(
    hashes: Iterable[int], parent: int | None = None, *, block: int = 2, **fields: Any
) -> BlockStored:
    """Blocks whose tokens are their hashes."""
    names = list(hashes)
    tokens = [name for name in names for _ in range(block)]
    return BlockStored(list(names), parent, tokens, block, **fields)


def inferred(*batches: tuple[float, Sequence[BlockEvent]]) -> Trace:
    found = EventTraceBuilder("mine", "mine.events", block=None, unit="batch")
    for number, (time, events) in enumerate(batches, 1):
        found.take(number, EventBatch(time, list(events)))
    return found.finish()


def requests(trace: Trace) -> list[tuple[float, list[int], int]]:
    """(time, ids, tokens of the answer) of each request."""
    return [
        (float(trace.times[n]), trace.ids[trace.starts[n] : trace.starts[n + 1]].tolist(),
         int(trace.outputs[n]))
        for n in range(len(trace))
    ]  # fmt: skip


class Engine:
    """A pool whose events are recorded, and what its requests were."""

    def __init__(self, name: str, blocks: int, path: Path) -> None:
        self.plan = small_plan(name, blocks, max_len=512)
        self.pool = BlockPool(self.plan, events=self._hear)
        self.now = 1e9
        self.recording = EventRecording(path)
        self.stored = 0
        """Blocks of the first group that keeps all tokens, since it was set to 0."""
        self.requests: list[tuple[list[int], int]] = []
        """Tokens up to the end of the prompt's whole blocks, and of the answer's."""
        self.prompts: list[list[int]] = []
        full = [n for n, g in enumerate(self.plan.groups) if g.kind == "full_attention"]
        self.group, self.block = full[0], self.plan.groups[full[0]].block

    def _hear(self, events: list[BlockEvent]) -> None:
        batch = EventBatch(self.now, events, 0)
        self.recording.write(ReceivedBatch(self.recording.batches, batch, False))
        for event in events:
            if isinstance(event, BlockStored) and event.group_idx == self.group:
                self.stored += len(event.block_hashes)

    def run(self, number: int, prompt: list[int], answer: list[int], chunk: int) -> None:
        """One request, in chunks, with an answer of 20 tokens a second."""
        self.now += 100
        self.stored = 0
        done = self.pool.admit(number, prompt, PrefixIdentity(weights="mine"))
        ends = {
            *range(done, len(prompt), chunk),
            len(prompt),
            *self.pool.stops(number, len(prompt)),
        }
        for end in sorted(ends - {done}):
            self.pool.reserve(number, end)
            self.pool.computed(number, end)
            self.now += 0.001
        known, after = list(prompt), self.stored
        for token in answer:
            self.now += 0.05
            self.pool.reserve(number, len(known) + 1)
            known.append(token)
            self.pool.computed(number, len(known), [token])
        self.pool.free(number)
        if self.stored:
            grown = self.stored - after
            # Where all of the prompt was found, the answer's first block is what is seen first.
            whole = len(known) // self.block - (grown if after else grown - 1)
            self.requests.append((known[: whole * self.block], (grown - (not after)) * self.block))
            self.prompts.append(prompt)


def random_prompt(dice: Random, block: int) -> list[int]:
    """Prompts that begin alike, and never end with a block."""
    blocks = [dice.randrange(3) for _ in range(dice.randint(0, 5))]
    return [*(one for one in blocks for _ in range(block)), *[7] * dice.randint(1, block - 1)]


def test_requests_are_those_that_a_pool_has_served(tmp_path: Path) -> None:
    """Token by token, for every kind of group, in chunks, with answers and evictions."""
    dice = Random(3)  # noqa: S311
    for name in ("dense", "sliding", "hybrid", "mixed"):
        path = tmp_path / f"{name}.events"
        engine = Engine(name, 60, path)
        for number in range(60):
            prompt = random_prompt(dice, engine.block)
            answer = [9 + number] * dice.choice([0, 3, 20, 40])
            engine.run(number, prompt, answer, dice.choice([engine.block * 2, 1000]))
        engine.recording.close()
        trace = read_trace(path)
        expected = [one for one, _ in engine.requests]
        assert 20 < len(expected) < 60, "some are found whole, and leave no event"
        assert len(trace) == len(expected)
        assert trace.outputs.tolist() == [answer for _, answer in engine.requests]
        assert trace.lengths.tolist() == [len(tokens) + 1 for tokens in expected]
        assert trace.unseen == Unseen()
        raw = [one for tokens in expected for one in ids_of(tokens, engine.block)]
        numbers: dict[int, int] = {}
        assert trace.ids.tolist() == [numbers.setdefault(one, len(numbers)) for one in raw]


def test_a_recorded_trace_is_found_again_as_the_prompts_were(tmp_path: Path) -> None:
    """Equal hits and evictions, in any memory, where prompts do not end with a block."""
    dice = Random(4)  # noqa: S311
    path = tmp_path / "mine.events"
    engine = Engine("dense", 2000, path)
    for number in range(60):
        engine.run(number, random_prompt(dice, BLOCK), [], 1000)
    engine.recording.close()
    logged = tmp_path / "mine.jsonl"
    lines = [msgspec.json.encode({"token_ids": prompt}) for prompt in engine.prompts]
    logged.write_bytes(b"\n".join(lines))
    one, two = read_trace(path), read_trace(logged, block=BLOCK)
    assert len(one) == len(two) < 60
    for name, block in (("dense", 16), ("dense", 48), ("sliding", 16), ("hybrid", 16)):
        for blocks in (40, 90, 4000):
            plan = small_plan(name, blocks, max_len=128, block_size=block)
            rates = [simulate(plan, trace, checkpoints="every-block") for trace in (one, two)]
            assert rates[0].block % BLOCK == 0
            assert rates[0].found == rates[1].found, (name, blocks)
            assert rates[0].evictions == rates[1].evictions, (name, blocks)


def test_what_follows_soon_goes_on_and_what_follows_late_is_another() -> None:
    more, one = range(3, 6), [6]
    # Two more blocks of a prompt, then two of the answer, as a decoder is quick.
    trace = inferred(
        (0, [stored([1, 2])]),
        (0.4, [stored(more, 2)]),
        (0.5, [stored(one, 5)]),
        (0.9, [stored([7], 6)]),
    )
    assert requests(trace) == [(0, [0, 1, 2, 3, 4], 4)]
    # Behind an answer, several blocks at once are the next turn; and so they are after a pause.
    for answered, late in (((0.1, [stored([3], 2)]), 0.2), ((0.001, []), 9.0)):
        turn = stored([8, 9], 3 if answered[1] else 2)
        trace = inferred((0, [stored([1, 2])]), answered, (late, [turn]))
        assert len(trace) == 2
        assert requests(trace)[1][0] == late
        assert len(requests(trace)[1][1]) == 5 if answered[1] else 4
    # A block that is too slow for an answer is another request's; quicker than any, the prompt's.
    assert len(inferred((0, [stored([1])]), (1.0, [stored([2], 1)]))) == 2
    assert requests(inferred((0, [stored([1])]), (0.003, [stored([2], 1)]))) == [(0, [0, 1], 0)]
    # Large blocks take a decoder long, and chunks of a prompt are not larger.
    large = [(n * 0.9, [stored([n + 1], n or None, block=2096)]) for n in range(3)]
    assert requests(inferred(*large)) == [(0, [0, 1, 2], 0)]
    slow = (40.0, [stored([4], 3, block=2096)])
    assert requests(inferred(*large, slow)) == [(0, [0, 1, 2], 2096)]
    # Two that branch inside what is known; two that are computed at the same time.
    trace = inferred((0, [stored([1, 2, 3])]), (0.1, [stored([8], 2)]), (0.1, [stored([9], 1)]))
    assert [ids for _, ids, _ in requests(trace)] == [[0, 1, 2], [0, 1, 3], [0, 4]]
    twins: list[BlockEvent] = [stored([1, 2]), stored([1, 2])]
    trace = inferred((0, twins), (0.1, [stored([3, 4], 2), stored([3, 4], 2)]))
    assert [ids for _, ids, _ in requests(trace)] == [[0, 1, 2, 3]] * 2
    # A clock that is set back makes no request come before the recording.
    assert inferred((5, [stored([1])]), (2, [stored([2])])).times.tolist() == [0, 0]


def test_requests_that_report_what_they_found_are_seen_once() -> None:
    """vLLM's `kv_cache_report_mode: full`: again in every step while there is no room."""
    first = (0.0, [stored([1, 2, 3])])
    whole = (50.0, [stored([1, 2, 3])])
    waiting = [(60.0 + n, [stored([1, 2])]) for n in range(5)]
    begun = (65.0, [stored([1, 2]), stored([4, 5], 2)])
    trace = inferred(first, whole, *waiting, begun)
    assert [ids for _, ids, _ in requests(trace)] == [[0, 1, 2], [0, 1, 2], [0, 1, 3, 4]]
    assert trace.times.tolist() == [0, 50, 60]
    two = inferred(first, (50.0, [*whole[1], *whole[1]]))
    assert len(two) == 3, "two of one moment are two"


def test_one_group_one_home_and_every_rank_count() -> None:
    window: Any = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window"}
    attention: Any = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    other = attention | {"group_idx": 2}
    sparse = BlockStored([3], None, [1, 1, 2, 2, 3, 3], 2, **window)
    tier = stored([77], medium="CPU")
    events = [sparse, stored([1, 2], **attention), stored([1, 2], **other), tier]
    inside = stored([9], 2, block=1, **attention)  # found by its first token
    trace = inferred((0, [*events, inside, BlockRemoved([1], group_idx=0)]))
    assert requests(trace) == [(0, [0, 1], 0)]
    found = EventTraceBuilder("ranks", "ranks.jsonl", block=None, unit="line")
    for rank in (0, 1):  # each rank has hashes of its own
        tokens = [rank + 5] * 2
        found.take(1, EventBatch(0.0, [BlockStored([1], None, tokens, 2)], rank))
    trace = found.finish()
    assert [ids for _, ids, _ in requests(trace)] == [[0], [1]]
    assert trace.unseen == Unseen(ranks=2)
    assert "2 data-parallel ranks" in " ".join(trace.unseen.sentences())


def test_adapters_salts_and_images_make_other_prompts() -> None:
    tokens = [5, 5]
    kinds: list[dict[str, Any]] = [
        {}, {"lora_name": "a"}, {"lora_name": "b"}, {"lora_id": 4},
        {"extra_keys": [("salt",)]}, {"extra_keys": [(("image", 0),)]},
    ]  # fmt: skip
    events: list[tuple[float, list[BlockEvent]]] = [
        (n * 100.0, [BlockStored([n], None, tokens, 2, **kind)]) for n, kind in enumerate(kinds)
    ]
    again = [(1000.0, [BlockStored([99], None, tokens, 2)])]  # an engine that was started anew
    assert inferred(*events, *again).ids.tolist() == [0, 1, 2, 3, 4, 5, 0]


def test_what_began_before_the_recording_is_left_out_and_counted() -> None:
    late: list[tuple[float, list[BlockEvent]]] = [
        (0, [stored([11, 12], 10)]),  # nobody knows what 10 is behind
        (0.1, [stored([13, 14], 12)]),  # and more of its prompt
        (50, [stored([15], 13)]),  # another
        (100, [stored([1, 2])]),
    ]
    trace = inferred(*late)
    assert requests(trace) == [(100, [0, 1], 0)]
    assert trace.unseen == Unseen(requests=2, tokens=10)
    assert "2 requests, which stored 10 tokens, are left out" in trace.unseen.sentences()[1]
    # Once it is stored from its beginning on, what comes behind it is known.
    trace = inferred(*late, (150, [stored([10, 11])]), (200, [stored([20], 11)]))
    assert [len(ids) for _, ids, _ in requests(trace)] == [2, 2, 3]
    with pytest.raises(AtlasError) as refusal:
        inferred(*late[:3])
    assert refusal.value.code is Code.BAD_TRACE
    assert "2 requests that begin before" in str(refusal.value)


def test_what_was_removed_is_known_while_an_engine_goes_on_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM says that a block is removed when the first of two copies is."""
    monkeypatch.setattr(stored_blocks, "REMEMBERED", 4)
    batches: list[tuple[float, list[BlockEvent]]] = [(0, [stored([1, 2]), BlockRemoved([1, 2])])]
    for n in range(1, 50):  # what is used stays, however much else is removed
        removed = BlockRemoved([2, 1, 100 + n] if n % 2 else [100 + n])
        batches.append((n * 100.0, [stored([100 + n], 2), removed]))
    trace = inferred(*batches)
    assert trace.unseen == Unseen()
    assert [len(ids) for _, ids, _ in requests(trace)] == [2] + [3] * 49
    cleared = inferred((0, [stored([1, 2]), AllBlocksCleared()]), (0.1, [stored([3, 4], 2)]))
    assert requests(cleared) == [(0, [0, 1, 2, 3], 0)], "a request under way goes on"


def test_memory_is_what_the_engine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_blocks, "REMEMBERED", 100)
    monkeypatch.setattr(event_trace, "MOST_OPEN", 10)
    for step in (0.0, 100.0):  # without times, too
        found = EventTraceBuilder("long", "long.events", block=None, unit="batch")
        for n in range(2000):
            events: list[BlockEvent] = [stored([3 * n, 3 * n + 1, 3 * n + 2])]
            events += [BlockRemoved([*range(3 * n - 60, 3 * n - 57)])] if n >= 20 else []
            found.take(n + 1, EventBatch(n * step, events))
        engine = found._engines[None]
        assert len(engine.blocks._there) <= 63
        assert len(engine.blocks._removed) <= 100
        assert max(len(engine._open), len(found._waiting)) <= 10
        assert len(found.finish()) == 2000
    monkeypatch.setattr(stored_blocks, "MOST_BLOCKS", 8)
    with pytest.raises(AtlasError) as refusal:
        inferred((0, [stored(range(9))]))
    assert "never removed" in str(refusal.value)


def recorded(path: Path, *batches: tuple[int, bool, list[BlockEvent]]) -> Path:
    with EventRecording(path) as recording:
        for number, gap, events in batches:
            batch = EventBatch(100.0 + number, events, 0)
            recording.write(ReceivedBatch(number, batch, gap))
    return path


def test_gaps_are_in_the_recording(tmp_path: Path) -> None:
    one: tuple[int, bool, list[BlockEvent]] = (0, False, [stored([1, 2])])
    cases: list[tuple[list[tuple[int, bool, list[BlockEvent]]], int]] = [
        ([one, (1, False, [])], 0),
        ([(7, True, [stored([1, 2])]), (8, False, [])], 1),
        ([one, (5, True, [stored([3], 2)])], 1),
        ([one, (5, False, [])], 1),  # the number tells it, too
        ([one, (1, True, []), (0, True, [])], 2),  # began anew
    ]
    for place, (batches, gaps) in enumerate(cases):
        trace = read_trace(recorded(tmp_path / f"{place}.events", *batches))
        assert trace.unseen is not None
        assert trace.unseen.gaps == gaps
        assert ("missing at" in " ".join(trace.unseen.sentences())) == bool(gaps)
    with pytest.raises(AtlasError) as refusal:
        EventRecording(tmp_path / "0.events")
    assert refusal.value.code is Code.UNWRITABLE
    assert (tmp_path / "0.events").stat().st_mode & 0o077 == 0, "prompts are their user's"


def test_json_lines_of_events_are_the_same_trace(tmp_path: Path) -> None:
    batches: list[tuple[float, list[BlockEvent]]] = [
        (5.0, [stored([1, 2]), BlockStored([b"\x01\xff"], 2, [3, 3], 2)]),
        (6.0, [BlockRemoved([2]), stored([7])]),
        (60.0, [stored([8, 9], 7), AllBlocksCleared()]),
    ]
    expected = requests(inferred(*batches))
    assert len(expected) == 3
    encode = msgspec.json.encode
    forms: dict[str, list[bytes]] = {
        "arrays": [encode(EventBatch(time, events, 0)) for time, events in batches],
        "objects": [encode({"ts": time, "events": events}) for time, events in batches],
        "events": [
            encode(msgspec.to_builtins(event) | {"ts": time, "of": "a logger"})
            for time, events in batches
            for event in events
        ],
    }
    for name, lines in forms.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(b"\n\n".join(lines))
        assert requests(read_trace(path)) == expected, name
    # Without times nothing tells requests apart that go on behind each other: they are joined.
    lines = [encode(stored([1, 2])), encode(stored([3], 2)), encode(stored([4, 5], 3))]
    path.write_bytes(b"\n".join(lines))
    assert requests(read_trace(path)) == [(0, [0, 1, 2, 3, 4], 0)]


def refused(read: Callable[[], object]) -> str:
    with pytest.raises(AtlasError) as refusal:
        read()
    assert refusal.value.code is Code.BAD_TRACE
    return str(refusal.value)


def test_events_that_lie_are_refused_with_their_line(tmp_path: Path) -> None:
    good: dict[str, Any] = msgspec.to_builtins(stored([1, 2]))
    other = BlockStored([2], 1, [5, 5], 2)
    lies: list[tuple[Any, str]] = [
        (good | {"block_size": 3}, "line 2: this is not a valid event"),
        (good | {"token_ids": [1, 2, 3]}, "line 2: this is not a valid event"),
        (good | {"token_ids": [1, 2, 3, -4]}, "line 2: this is not a valid event"),
        (good | {"block_hashes": [None]}, "line 2: this is not a valid event"),
        (good | {"type": "BlockStolen"}, "line 2: this is not a valid event"),
        (good | {"ts": "noon"}, "line 2: this is not a valid event"),
        (good | {"data_parallel_rank": -1}, "line 2: this is not a valid event"),
        ([1.0, [good], -1], "line 2: this is not a valid event"),
        ({"events": [good, 7]}, "line 2: this is not a valid event"),
        ({"token_ids": [1, 2]}, "line 2: this is not a valid event"),
        (b'{"ts": 1e999, "events": []}', "line 2: this is not a valid event"),
        (b'{"type": "BlockStored", "block', "line 2: this is not a valid event"),
        (b"[" * 100_000, "line 2: this is not a valid event"),
        (
            other,
            "line 2: two events use the same block hash for different prefixes. Got block hash 2 ",
        ),
        (
            stored([2]),
            "line 2: two events use the same block hash for different prefixes. Got block hash 2 ",
        ),
        (stored([3], 2, block=4), "line 2: the block size differs from earlier events"),
        (
            BlockStored([3], 2, [3] * 4, 2),
            "line 2: the event has more tokens than its blocks can hold",
        ),
    ]
    for number, (lie, words) in enumerate(lies):
        path = tmp_path / f"{number}.jsonl"
        line = lie if isinstance(lie, bytes) else msgspec.json.encode(lie)
        path.write_bytes(msgspec.json.encode(good) + b"\n" + line)
        told = refused(partial(read_trace, path))
        assert f"{path.name}, {words}" in told, (lie, told)
    path.write_bytes(msgspec.json.encode(good))
    assert "the block size must be" in refused(lambda: read_trace(path, block=0))
    assert "contains no request" in refused(lambda: read_trace(path, block=64))


def test_a_recording_that_was_cut_or_changed_is_refused(tmp_path: Path) -> None:
    first: tuple[int, bool, list[BlockEvent]] = (0, False, [stored([1, 2])])
    path = recorded(tmp_path / "mine.events", first, (1, False, [stored([5])]))
    one = recorded(tmp_path / "one.events", first).stat().st_size
    content = path.read_bytes()
    for cut in [*range(len(FIRST_LINE) + 1, len(content), 9), one]:
        path.write_bytes(content[:cut])
        if cut == one:
            assert len(read_trace(path)) == 1
            continue
        told = refused(lambda: read_trace(path))
        whole = one if cut > one else len(FIRST_LINE)
        assert f"truncate -s {whole} -- mine.events" in told
    for place in range(len(FIRST_LINE), len(content), 5):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
        try:
            read_trace(path)
        except AtlasError as refusal:
            assert refusal.code is Code.BAD_TRACE
    path.write_bytes(FIRST_LINE)
    refused(lambda: read_trace(path))
