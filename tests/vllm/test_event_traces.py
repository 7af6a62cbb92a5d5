"""Events of vLLM's own KVCacheManager, read as a trace: the requests that it served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvatlas.pool import EventRecording, ReceivedBatch
from kvatlas.pool.events import decode_batch
from kvatlas.simulate import Trace, read_trace
from kvatlas.simulate.traces.content_ids import ids_of
from tests.vllm.made_up_groups import BLOCK, chunks, manager_of, tokens_of
from tests.vllm.test_hit_rates import SAMPLE, ending_with_blocks


class Served:
    """Requests one after the other through a manager, whose events are recorded."""

    def __init__(self, kinds: list[str], blocks: int, path: Path, *, report: bool) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.kinds, self.report, self.now = kinds, report, 1e9
        self.full = kinds.index("full")
        self.manager = manager_of(kinds, blocks, "vllm-default", enable_kv_cache_events=True)
        self.recording = EventRecording(path)

    def step(self) -> int:
        """Record what a step said; blocks of full attention that it stored, or reported."""
        from vllm.distributed.kv_events import BlockStored, KVEventBatch

        self.now += 0.02
        taken = self.manager.take_events()
        batch = decode_batch(msgspec.msgpack.encode(KVEventBatch(ts=self.now, events=taken)))
        self.recording.write(ReceivedBatch(self.recording.batches, batch, False))
        return sum(
            len(one.block_hashes)
            for one in taken
            if isinstance(one, BlockStored) and one.group_idx == self.full
        )

    def serve(self, name: str, tokens: list[int]) -> bool:
        """A prompt in chunks; whether any event tells of it."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self.now += 100
        extra = {"kv_cache_report_mode": "full"} if self.report else None
        params = SamplingParams(max_tokens=2, extra_args=extra)
        request = Request(name, tokens, params, None, block_hasher=self.hasher)
        self.manager.new_step_starts()
        cached: Any
        cached, begun, junction = self.manager.get_computed_blocks(request)
        request.shared_prefix_boundary = junction
        told = 0
        stops = {*chunks(len(tokens), begun, junction, self.kinds, "vllm-default")}
        stops |= {*range(begun + 4 * BLOCK, len(tokens), 4 * BLOCK)}
        for stop in sorted(stops):
            fresh = begun - request.num_computed_tokens
            if self.manager.allocate_slots(request, stop - begun, fresh, cached) is None:
                break
            request.num_computed_tokens = begun = stop
            cached = None
            told += self.step()
        self.manager.free(request)
        return told > 0


def expected(prompts: list[list[int]]) -> tuple[list[int], list[int]]:
    """The ids and lengths of prompts, as far as they are whole blocks."""
    whole = [tokens[: len(tokens) // BLOCK * BLOCK] for tokens in prompts]
    raw = [one for tokens in whole for one in ids_of(tokens, BLOCK)]
    numbers: dict[int, int] = {}
    ids = [numbers.setdefault(one, len(numbers)) for one in raw]
    return ids, [len(tokens) + 1 for tokens in whole]


def sample() -> list[Trace]:
    trace = read_trace(SAMPLE)
    return [trace, ending_with_blocks(trace, BLOCK)]


@pytest.mark.parametrize("report", [False, True], ids=["stored", "reported"])
@pytest.mark.parametrize(
    "kinds", [["full"], ["window", "full"], ["full", "state", "state"]], ids=" ".join
)
def test_the_requests_that_vllm_served_are_read_back(
    kinds: list[str], report: bool, tmp_path: Path
) -> None:
    for place, trace in enumerate(sample()):
        for blocks in (90, 10_000):
            path = tmp_path / f"{place}-{blocks}.events"
            served = Served(kinds, blocks * len(kinds), path, report=report)
            asked = [
                tokens_of(trace, n) for n in range(len(trace)) for _ in range(1 + (n % 5 == 0))
            ]
            prompts = [one for n, one in enumerate(asked) if served.serve(str(n), one)]
            served.recording.close()
            found = read_trace(path)
            ids, lengths = expected(prompts)
            print(f"{kinds} {blocks}: {len(found)} of {len(asked)} requests")
            assert found.lengths.tolist() == lengths
            assert found.ids.tolist() == ids
            assert not np.any(found.outputs)
            # Only who reports what it found is seen where it found everything.
            assert (len(found) == len(asked)) == report
