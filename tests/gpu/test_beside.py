"""Pulls beside what else a GPU does: graphs that are captured meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from kvatlas.wire import Session
from tests.gpu.peer import contents_of, move_of
from tests.gpu.ranks import GpuRanks
from tests.gpu.test_wires import TOKENS, small
from tests.routing import oracle


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
                    about: dict[str, Any] = {"destination_blocks": target.blocks, "tokens": TOKENS}
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
    assert target.wrong({0: right}) == 0
    target.close()
    source.close()
