"""Streams of many nodes in one process: none is another's, nor one that torch hands out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from kvatlas.copying.cuda_driver import load_driver
from kvatlas.copying.torch_queue import TorchQueue
from kvatlas.wire import Node, make_transport
from tests.gpu.test_wires import small
from tests.identities import OURS

OWNERS = 40
"""More than the streams that torch has of a priority."""


@contextmanager
def queues_of(driver: Any) -> Iterator[list[TorchQueue]]:
    made = [driver.queue(0, 0) for _ in range(OWNERS)]
    try:
        yield made
    finally:
        for one in made:
            one.close()


def engine_streams() -> list[Any]:
    """All that torch has to hand out."""
    stream: Any = torch.cuda.Stream
    return [stream(priority=priority) for priority in (0, -1) for _ in range(32)]


def test_forty_queues_share_no_stream_with_each_other_or_with_an_engine() -> None:
    with queues_of(load_driver()) as queues:
        ours = [one.stream.cuda_stream for one in queues]
        ours += [one.tables.aside.cuda_stream for one in queues]
        theirs = [one.cuda_stream for one in engine_streams()]
        assert len(set(ours)) == 2 * OWNERS
        assert not set(ours) & set(theirs)


def test_each_of_forty_queues_captures_while_an_engine_works_on_all_streams_of_torch() -> None:
    driver: Any = load_driver()
    here = torch.arange(OWNERS, dtype=torch.int64).pin_memory()
    there = torch.full((OWNERS,), -1, dtype=torch.int64, device="cuda")
    numbers = torch.zeros(64, device="cuda")
    streams = engine_streams()
    torch.cuda.synchronize()
    with queues_of(driver) as queues:
        graphs = []
        for place, one in enumerate(queues):
            for number, engine in enumerate(streams):
                with torch.cuda.stream(engine):
                    torch.cuda._sleep(10_000)  # type: ignore[no-untyped-call]
                    numbers[number] += 1
            aside, at = one.tables.aside.cuda_stream, 8 * place

            def upload(aside: int = aside, at: int = at) -> None:
                driver.upload(there.data_ptr() + at, here.data_ptr() + at, 8, aside)
                with torch.cuda.stream(streams[0]):  # none of what is captured
                    numbers[0] += 1

            graphs.append(driver.capture(aside, upload))
        torch.cuda.synchronize()
        assert there.tolist() == [-1] * OWNERS  # captured, and not done
        for graph, one in zip(graphs, queues, strict=True):
            driver.launch_graph(graph, one.stream.cuda_stream)
        torch.cuda.synchronize()
        assert there.tolist() == list(range(OWNERS))
        assert numbers.tolist() == [2.0 * OWNERS, *[float(OWNERS)] * 63]
        for graph in graphs:
            driver.end_graph(0, graph)


def test_an_engine_captures_on_every_stream_of_torch_beside_forty_queues_at_work() -> None:
    numbers = torch.zeros(64, device="cuda")
    with queues_of(load_driver()) as queues:
        graphs = [torch.cuda.CUDAGraph() for _ in range(64)]
        torch.cuda.synchronize()
        for number, engine in enumerate(engine_streams()):
            with torch.cuda.stream(engine):
                graphs[number].capture_begin(capture_error_mode="thread_local")
                for one in queues[number % OWNERS :][:2]:
                    with torch.cuda.stream(one.stream):
                        torch.cuda._sleep(10_000)  # type: ignore[no-untyped-call]
                numbers[number] += 1
                graphs[number].capture_end()
                graphs[number].replay()
        torch.cuda.synchronize()
        assert numbers.tolist() == [1.0] * 64


def test_forty_nodes_opened_and_closed_give_back_their_streams() -> None:
    made, streams = small("dense"), load_driver().streams
    for _ in range(2):
        with ExitStack() as nodes:
            for _ in range(OWNERS):
                pools = {
                    index: torch.zeros(pool.nbytes, dtype=torch.uint8, device="cuda")
                    for index, pool in made.rank_pools(0).items()
                }
                transport = make_transport("cuda")
                nodes.enter_context(
                    Node(made, memory=pools, transport=transport, buffers=0, identity=OURS)
                )
            before = streams.idle(0)
        after = streams.idle(0)
        assert after == before + 2 * OWNERS
    with queues_of(load_driver()):
        assert streams.idle(0) == after - OWNERS
