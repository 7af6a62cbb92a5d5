"""Pulls beside what else a GPU does: graphs that are captured meanwhile, formats that change."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from kvatlas.planning import Plan
from kvatlas.wire import Session
from tests.gpu.peer import contents_of, move_of
from tests.gpu.ranks import GUARD, GpuRanks
from tests.gpu.test_wires import TOKENS, small
from tests.planning.models import model_of
from tests.routing import oracle
from tests.routing.cases import small_plan
from tests.routing.converting import assert_converted, conversion_of, fill_sources, scales_of
from tests.routing.test_conversion import attention, latent


def pool_bytes(ranks: GpuRanks, made: Plan) -> dict[int, Any]:
    """The pools of every rank, as the oracle keeps them."""
    torch.cuda.synchronize()
    memories = {}
    for rank, pools in ranks.whole.items():
        memories[rank] = oracle.Memory(made, rank, np.random.default_rng(0))
        for index, whole in pools.items():
            memories[rank].pools[index][:] = whole[GUARD:-GUARD].cpu().numpy()
    return memories


def test_formats_are_converted_over_cuda() -> None:
    for src, dst in (
        (
            small_plan(model_of("dense", {"attn": attention("fp8")}), layout="LBNHC"),
            small_plan(model_of("dense", {"attn": attention("bf16")}), block_size=32),
        ),
        (
            small_plan(model_of("mla", {"attn": latent("bf16")})),
            small_plan(model_of("mla", {"attn": latent("fp8_ds_mla")})),
        ),
    ):
        named = conversion_of(src, dst)
        move = move_of(src, dst, TOKENS)
        memories, numbers = fill_sources(move, np.random.default_rng(5))
        noise = {0: oracle.Memory(dst, 0, np.random.default_rng(6)).pools}
        filled = {rank: memory.pools for rank, memory in memories.items()}
        about: dict[str, Any] = {"convert": named}
        source = GpuRanks(src, "cuda", filled, TOKENS, scales=scales_of(src), **about)
        target = GpuRanks(dst, "cuda", noise, TOKENS, scales=scales_of(dst), **about)
        before = pool_bytes(target, dst)
        source.offer("r")
        with Session(target.nodes[0], source.endpoints) as session:
            session.pull("r", dst_blocks=target.blocks, tokens=TOKENS).wait(30)
        assert_converted(move, numbers, before, pool_bytes(target, dst))
        target.close()
        source.close()


def test_a_graph_is_captured_and_played_while_pulls_run() -> None:
    src, dst = small("dense", layout="LBNHC"), small("dense", layout="BHLNC")
    move = move_of(src, dst, TOKENS)
    source = GpuRanks(src, "cuda", contents_of(move, 5), TOKENS)
    noise = oracle.Memory(dst, 0, np.random.default_rng(9))
    target = GpuRanks(dst, "cuda", {0: noise.pools}, TOKENS)
    stop, failures = threading.Event(), []

    def pull_again_and_again() -> None:
        number = 0
        with Session(target.nodes[0], source.endpoints) as session:
            while not number or not stop.is_set():
                number += 1
                source.offer(f"r{number}")
                try:
                    about: dict[str, Any] = {"dst_blocks": target.blocks, "tokens": TOKENS}
                    session.pull(f"r{number}", **about).wait()
                except Exception as problem:
                    failures.append(problem)

    pulling = threading.Thread(target=pull_again_and_again)
    pulling.start()
    try:
        numbers = torch.zeros(1 << 16, device="cuda")
        for turn in range(5):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for _ in range(20):
                    numbers += 1
            for _ in range(10):
                graph.replay()
            torch.cuda.current_stream().synchronize()
            assert float(numbers.min()) == float(numbers.max()) == 200 * (turn + 1)
    finally:
        stop.set()
        pulling.join()
    assert not failures
    right, _ = oracle.expected(move, 0, noise)
    assert target.wrong({0: right.pools}) == 0
    target.close()
    source.close()
