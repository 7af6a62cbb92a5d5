"""A request of the shapes that vLLM keeps on a CPU, pulled without vLLM, beside raw NIXL."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from tests.vllm.shapes import Config, FullAttentionSpec, Group, vllm_config

from benchmarks.wires import raw_nixl, scattered
from kvatlas.engines.vllm import ConnectorSettings, describe_engine
from kvatlas.planning import Plan
from kvatlas.routing import Copy, route
from kvatlas.routing import scattered as scattered_blocks
from kvatlas.wire import Node, Session, make_transport, memory_of, pools_for
from kvatlas.wire.sample_server import SAMPLE_IDENTITY, SampleTask, run_sample_server

LAYERS, HEADS, HEAD = 16, 8, 64
TURNS = 11


def plan_of(block: int) -> Plan:
    """The caches of an engine that serves the model of `vllm_cost`, of 160 MiB at least."""
    names = [f"layers.{number}.attn" for number in range(LAYERS)]
    spec = FullAttentionSpec(block_size=block, num_kv_heads=HEADS, head_size=HEAD, head_size_v=HEAD)
    config = vllm_config(kv_heads=HEADS)
    config.model_config.max_model_len = 2048
    config.model_config.get_total_num_hidden_layers = lambda: LAYERS
    config.model_config.model_arch_config.total_num_attention_heads = HEADS
    made = Config([Group(spec, names)], num_blocks=2560 // block)
    return describe_engine(config, made, backends=dict.fromkeys(names, "CPU_ATTN"))


class PullTimes(NamedTuple):
    """Median seconds of a request's bytes, in three ways."""

    raw: float
    """By NIXL's own calls, in the longest runs that there are."""
    same_runs: float
    """By NIXL's own calls, in the runs between the two engines' blocks."""
    pulled: float
    """By a session."""
    runs: int
    """How many runs there are between the blocks."""


def pull_times(block: int, tokens: int, per_token: int, run: int) -> PullTimes:
    """A request from blocks of 64 tokens, in turns between the same two processes."""
    source, target, near = plan_of(64), plan_of(block), make_transport("nixl")
    pools, piece = pools_for(target, 0, near), ConnectorSettings().piece
    # A token more than is pulled, so that the source does not let go of it.
    task = SampleTask(plan=source, transport="nixl", seed=1, requests=("0",), tokens=tokens + 1)
    with (
        run_sample_server(task) as endpoints,
        Node(
            target, memory=memory_of(pools), transport=near, piece=piece, identity=SAMPLE_IDENTITY
        ) as node,
        Session(node, endpoints) as session,
    ):
        link: Any = session.link(0)
        blocks = scattered_blocks(target, tokens)
        ends = link.agent, link.peer, link.peer_memory[0].address, node.memory[0].address
        raw = raw_nixl(*ends, scattered(run, tokens * per_token))
        between = runs_between(source, target, tokens)

        def pull() -> None:
            session.pull("0", destination_blocks=blocks, tokens=tokens).wait()

        one, other, pulled = _in_turns(raw, raw_nixl(*ends, between), pull)
        return PullTimes(one, other, pulled, len(between))


def runs_between(source: Plan, target: Plan, tokens: int) -> Copy:
    """The runs of a request between blocks of two plans."""
    tables = [scattered_blocks(plan, tokens) for plan in (source, target)]
    ends: dict[str, Any] = {
        "source_blocks": tables[0],
        "destination_blocks": tables[1],
        "tokens": tokens,
    }
    copies = route(source, target).bind(source_rank=0, destination_rank=0, **ends).copies
    columns = (
        [getattr(one, name) for one in copies] for name in ("source", "destination", "length")
    )
    return Copy(0, 0, *map(np.concatenate, columns))


def _in_turns(*acts: Callable[[], Any]) -> list[float]:
    taken: list[list[float]] = [[] for _ in acts]
    for turn in range(TURNS + 2):
        for act, times in zip(acts, taken, strict=True):
            begun = time.perf_counter()
            act()
            if turn > 1:  # memory is there, and the link was measured
                times.append(time.perf_counter() - begun)
    return [statistics.median(times) for times in taken]
