"""Simulated hits beside those of vLLM's own KVCacheManager, request by request.

Two ways of keeping checkpoints: densely (`prefix_cache_retention_interval=None`, states at every
block), and vLLM's default (0, states aligned to chunks that end where its scheduler ends them).
A prompt is computed at once, or in the chunks that states ask for; one token is decoded, and the
request ends. On whole traces where `KVATLAS_FACTS` names some, else on a small one of our own;
the output says which.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvatlas.cli.progress import progress_bar
from kvatlas.pool.checkpoints import EveryBlock, checkpoint_policy
from kvatlas.pool.simulation import CopyingReplay, LayerClass, PoolModel, ReplayPolicy, Spans
from kvatlas.pool.simulation.replay import Progress
from kvatlas.pool.traces import Ints, Trace, read_trace
from kvatlas.specs import Visibility

pytest.importorskip("vllm")

SAMPLE = Path(__file__).parents[1] / "pool" / "sample_trace.jsonl"
BLOCK = 256
WINDOW = 1024


def tokens_of(trace: Trace, request: int) -> list[int]:
    """Tokens that are equal exactly where the trace's ids are."""
    ids = trace.ids[trace.starts[request] : trace.starts[request + 1]]
    spread = np.repeat(ids * trace.block, trace.block) + np.tile(np.arange(trace.block), len(ids))
    tokens: list[int] = spread[: trace.lengths[request]].tolist()
    return tokens


def manager_of(kinds: list[str], blocks: int, kept: str, **options: Any) -> Any:
    """vLLM's manager of these groups, which keeps checkpoints so."""
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    dense = kept == "every-block"
    mode: Any = "all" if dense else "align"
    heads: dict[str, Any] = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
    specs = {
        "full": lambda: FullAttentionSpec(block_size=BLOCK, **heads),
        "window": lambda: SlidingWindowSpec(block_size=BLOCK, sliding_window=WINDOW, **heads),
        "state": lambda: MambaSpec(
            block_size=BLOCK, shapes=((16, 16),), dtypes=(torch.float32,), mamba_cache_mode=mode
        ),
    }
    groups = [KVCacheGroupSpec([f"layer.{n}"], specs[kind]()) for n, kind in enumerate(kinds)]
    config = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=None if dense else 0,
    )
    sizes = {"scheduler_block_size": BLOCK, "hash_block_size": BLOCK}
    return KVCacheManager(config, 1 << 20, **sizes, **options)


def chunks(tokens: int, hit: int, junction: int, kinds: list[str], kept: str) -> list[int]:
    """Where vLLM's scheduler ends the chunks of a prompt: states are kept at ends of chunks."""
    stops = {tokens}
    if "state" in kinds and kept != "every-block":
        stops |= {(tokens - 1) // BLOCK * BLOCK, junction // BLOCK * BLOCK}
    return sorted(stop for stop in stops if stop > hit)


def vllm_hits(
    trace: Trace, kinds: list[str], blocks: int, kept: str, told: Progress | None = None
) -> list[int]:
    """Tokens that vLLM finds of each request."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    manager = manager_of(kinds, blocks, kept)
    found = []
    for number in range(len(trace)):
        if told:
            told(number / len(trace))
        manager.new_step_starts()
        params = SamplingParams(max_tokens=2)
        tokens = tokens_of(trace, number)
        request = Request(str(number), tokens, params, None, block_hasher=hasher)
        computed, hit, junction = manager.get_computed_blocks(request)
        request.shared_prefix_boundary = junction
        begun, cached = hit, computed
        for stop in chunks(len(tokens), hit, junction, kinds, kept):
            fresh = begun - request.num_computed_tokens
            if manager.allocate_slots(request, stop - begun, fresh, cached) is None:
                break
            request.num_computed_tokens = begun = stop
            cached = None
        else:
            request.append_output_token_ids(7)
            manager.allocate_slots(request, 1)
            request.num_computed_tokens += 1
        found.append(hit if request.num_computed_tokens > len(tokens) else 0)
        manager.free(request)
    return found


class WholePrompts(CopyingReplay):
    """A replay that has as many blocks in use as vLLM while a prompt is computed at once."""

    def __init__(self, trace: Trace, *given: Any) -> None:
        super().__init__(*given)
        self._lengths = trace.lengths.tolist()

    def serve(self, request: int) -> int:
        """Remember which request it is."""
        self._request = request
        return super().serve(request)

    def _entries(self, spans: Ints, hit: int, wanted: Ints) -> list[Ints]:
        """What is kept; beside it, what vLLM takes and nobody can find."""
        parts = super()._entries(spans, hit, wanted)
        few = not isinstance(self.policy.checkpoints, EveryBlock)
        held = dead = written = 0
        for one, first, part in zip(self.model.classes, self._first, parts, strict=True):
            if one.needs == "window":
                unnamed = np.setdiff1d(np.arange(hit, len(spans)), part)
                held += len(unnamed)
                dead += int(np.count_nonzero(unnamed < first[len(spans)]))
            elif one.needs == "state" and few:
                written += 1  # the state behind the prompt's last token
        tokens = self._lengths[self._request]
        if tokens % BLOCK == 0:  # the decoded token begins a block: one that a window left, if any
            held += written + max(len(parts) - dead, 0)
        elif (tokens + 1) % BLOCK == 0:  # it ends a block, which was counted above
            held += written
        else:
            held += len(parts)
        self._in_flight[0, self._request] = held
        return parts


def spans_of(trace: Trace) -> Spans:
    """What vLLM keeps: also a block that the one decoded token fills; ends of prompts exactly."""
    prompts = Spans.of(trace, BLOCK)
    filled = Spans.of(replace(trace, lengths=trace.lengths + 1), BLOCK)
    return replace(filled, reusable=prompts.reusable, known=prompts.reusable)


def simulated_hits(trace: Trace, kinds: list[str], blocks: int, kept: str) -> list[int]:
    """Tokens that the simulation finds, with vLLM's checkpoints and order."""
    shapes = {
        "full": LayerClass("all", 0, 1),
        "window": LayerClass("window", 0, 1, Visibility(window=WINDOW)),
        "state": LayerClass("state", 0, 1),
    }
    # One class a group: vLLM may evict one of two states, and not the other.
    classes = tuple(shapes[kind] for kind in kinds)
    policy = ReplayPolicy(checkpoints=checkpoint_policy(kept), by_group=True)
    model = PoolModel(BLOCK, classes, (blocks - 1,))
    hits = WholePrompts(trace, model, spans_of(trace), policy).run().hits
    return [int(hit) * BLOCK for hit in hits]


def ending_with_blocks(trace: Trace) -> Trace:
    """The same with prompts that end where a block does, or one token before."""
    uses = np.bincount(trace.ids)
    alone = uses[trace.ids[trace.starts[1:] - 1]] == 1  # nobody else says how long that block is
    ends = -(-trace.lengths // BLOCK) * BLOCK - np.arange(len(trace)) % 2
    return replace(trace, lengths=np.where(alone, ends, trace.lengths))


def traces_and_blocks() -> list[tuple[Trace, tuple[int, ...]]]:
    """What is compared, in pools of so many blocks a group."""
    facts = os.environ.get("KVATLAS_FACTS")
    if facts:
        folder = Path(facts) / "traces"
        return [
            (read_trace(folder / "synthetic_trace.jsonl"), (2_000, 20_000)),
            (read_trace(folder / "conversation_trace.jsonl"), (20_000,)),
        ]
    sample = read_trace(SAMPLE)
    return [(sample, (60, 90, 150, 10_000)), (ending_with_blocks(sample), (60, 90, 120, 150, 200))]


@pytest.mark.parametrize("kept", ["every-block", "vllm-default"])
@pytest.mark.parametrize(
    "kinds", [["full"], ["window", "full"], ["full", "state", "state"]], ids=" ".join
)
def test_vllm_finds_what_is_simulated(kinds: list[str], kept: str) -> None:
    for trace, sizes in traces_and_blocks():
        for blocks in sizes:
            name = f"{trace.name} {kept} {kinds} {blocks}"
            with progress_bar(name) as told:
                theirs = vllm_hits(trace, kinds, blocks * len(kinds), kept, told)
            ours = simulated_hits(trace, kinds, blocks * len(kinds), kept)
            rates = [sum(hits) / trace.tokens for hits in (theirs, ours)]
            print(f"{name}: {rates[0]:.4f}, {rates[1]:.4f} simulated")
            assert theirs == ours
