"""Simulated hits of vLLM's plans beside those of vLLM's own KVCacheManager, request by request.

The manager is made from the plan's own groups and blocks, by vLLM's functions, and serves the
trace's requests one after the other, in the steps of vLLM's scheduler. Two ways of keeping
checkpoints: densely (`prefix_cache_retention_interval=None`, states at every block), and vLLM's
default (0, states at ends of steps). On whole traces where `KVATLAS_FACTS` names some, else on
samples of our own; the output says which.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import Request

from kvatlas.models import Model
from kvatlas.planning import Plan, plan
from kvatlas.simulate import found_by_request, simulate
from kvatlas.simulate.traces import Trace, read_trace
from tests.vllm.kv_cache_configs import kv_cache_config

FACTS = os.environ.get("KVATLAS_FACTS")
SAMPLE = Path(__file__).parents[1] / "pool" / "sample_trace.jsonl"
MODELS = {
    "dense": "Llama-3.1-70B",
    "windowed": "Gemma-3-27B",
    "windowed and small": "gpt-oss-120b",
    "hybrid": "Qwen3.5-397B-A17B",
    "hybrid with smaller blocks": "Nemotron-H-8B",
}
BATCHED = 2_000
"""Tokens of a step: no multiple of any block."""


def quick_hash(content: Any) -> bytes:
    """A hash for vLLM's blocks that takes less time than its own."""
    return hash(content).to_bytes(8, "big", signed=True) * 4


def prompt_of(trace: Trace, request: int) -> list[int]:
    """Tokens that are equal exactly where the trace's ids are; those without an id are alone."""
    ids = trace.ids[trace.starts[request] : trace.starts[request + 1]]
    spread = np.repeat(ids * trace.block, trace.block) + np.tile(np.arange(trace.block), len(ids))
    alone = [(1 << 40) + request] * int(max(trace.lengths[request] - len(spread), 0))
    return [*spread[: trace.lengths[request]].tolist(), *alone]


class Vllm:
    """vLLM's manager of a plan's blocks, and as much of its scheduler as divides prompts."""

    def __init__(self, made: Plan, kept: str) -> None:
        dense = kept == "every-block"
        config = kv_cache_config(made, Model.load(made.model))
        config.prefix_cache_retention_interval = None if dense else 0
        for group in config.kv_cache_groups:
            if isinstance(group.kv_cache_spec, MambaSpec):
                mode: Any = "all" if dense else "align"
                group.kv_cache_spec = replace(group.kv_cache_spec, mamba_cache_mode=mode)
        (self.block,) = {group.kv_cache_spec.block_size for group in config.kv_cache_groups}
        sizes = {"scheduler_block_size": self.block, "hash_block_size": self.block}
        self.manager = KVCacheManager(config, 1 << 20, **sizes)
        assert config.num_blocks == made.num_blocks
        self.splits = not dense and any(group.kind == "recurrent" for group in made.groups)
        init_none_hash(quick_hash)
        self.hasher = get_request_block_hasher(self.block, quick_hash)

    def hit(self, name: str, prompt: list[int]) -> int:
        """Serve a prompt, whose answer is one token; the tokens that were found."""
        params = SamplingParams(max_tokens=1)
        request = Request(name, prompt, params, None, block_hasher=self.hasher)
        computed, hit, request.shared_prefix_boundary = self.manager.get_computed_blocks(request)
        fresh, cached = hit, computed
        while request.num_computed_tokens < len(prompt):
            self.manager.new_step_starts()
            tokens = min(len(prompt) - request.num_computed_tokens - fresh, BATCHED)
            if self.splits:
                tokens = self.split(request, tokens, fresh)
            assert self.manager.allocate_slots(request, tokens, fresh, cached) is not None
            request.num_computed_tokens += fresh + tokens
            fresh, cached = 0, None
        self.manager.free(request)
        return int(hit)

    def split(self, request: Request, tokens: int, found: int) -> int:
        """What vLLM's scheduler makes of a step, so that states are kept."""
        scheduler: Any = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=self.block),
            scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
            block_size=self.block,
            hash_block_size=self.block,
            max_num_scheduled_tokens=BATCHED,
            mamba_has_prefill_checkpoint_blocks=False,
            mamba_prefill_checkpoint_alignment=None,
            mamba_partial_cache_hit=False,
            mamba_shared_prefix_checkpoint=False,
            use_eagle_block_drop=False,
        )
        return int(Scheduler._mamba_block_aligned_split(scheduler, request, tokens, found))


def answered_at_once(trace: Trace) -> Trace:
    """The same with answers of one token, whose content nobody has to know."""
    return replace(trace, outputs=trace.outputs * 0)


def in_whole_blocks(trace: Trace) -> Trace:
    """Prompts cut to whole blocks of the trace, and a token: their ends are then in the trace.

    Another request that comes past a prompt's end has another id for the block with it, whatever
    its tokens are, so the simulation keeps the last state that the trace can know of.
    """
    counts = np.diff(trace.starts)
    whole = np.minimum(trace.lengths // trace.block, counts)
    starts = np.concatenate([[0], np.cumsum(whole)])
    inside = np.arange(starts[-1]) - np.repeat(starts[:-1], whole)
    ids = trace.ids[np.repeat(trace.starts[:-1], whole) + inside]
    return replace(trace, ids=ids, starts=starts, lengths=whole * trace.block + 1)


def ending_with_blocks(trace: Trace, block: int) -> Trace:
    """The same with prompts that end where a block does, or one token before."""
    uses = np.bincount(trace.ids)
    alone = uses[trace.ids[trace.starts[1:] - 1]] == 1  # nobody else says how long that block is
    ends = -(-trace.lengths // block) * block - np.arange(len(trace)) % 2
    return replace(trace, lengths=np.where(alone, ends, trace.lengths))


def traces(kept: str) -> list[Trace]:
    """What is compared: two samples of our own, or whole traces."""
    if FACTS:
        names = ("synthetic_trace.jsonl", "conversation_trace.jsonl")
        found = [read_trace(Path(FACTS) / "traces" / name) for name in names]
    else:
        found = [read_trace(SAMPLE)]
        found.append(replace(ending_with_blocks(found[0], 16), name="ends with blocks"))
    found = [answered_at_once(trace) for trace in found]
    return found if kept == "every-block" else [in_whole_blocks(trace) for trace in found]


def plans(model: str, trace: Trace) -> Iterator[Plan]:
    """vLLM's plans from little more memory than one request needs to room for all of them."""
    longest = int(trace.lengths.max())
    asked: dict[str, Any] = {"policy": "vllm", "max_len": longest, "in_flight": 2 * BATCHED}
    sizing = plan(model, memory="4TiB", **asked)
    steps = sum(BATCHED // group.block + 2 for group in sizing.groups)
    least = sum(sizing.blocks_per_request().values()) + steps
    tokens = len(np.unique(trace.ids)) * trace.block
    most = least + tokens // sizing.block_size * len(sizing.groups)
    for share in (8,) if FACTS else (1000, 30, 8, 1):
        yield plan(model, memory=(least + most // share) * sizing.bytes_per_block, **asked)


@pytest.mark.parametrize("kept", ["every-block", "vllm-default"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_vllm_finds_what_is_simulated(model: str, kept: str) -> None:
    for trace in traces(kept):
        for made in plans(model, trace):
            name = f"{trace.name}, {kept}, {model} in {made.num_blocks:,} blocks"
            theirs = Vllm(made, kept)
            found = [theirs.hit(str(n), prompt_of(trace, n)) for n in range(len(trace))]
            rates = simulate(made, trace, checkpoints=kept)
            print(f"{name}: {sum(found) / trace.tokens:.4f}, {rates.hit_rate:.4f} simulated")
            assert rates.found == sum(found)
            assert found_by_request(made, trace, checkpoints=kept).tolist() == found
