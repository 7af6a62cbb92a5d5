"""Formats that change while a GPU copies: what is cast on the way, and what is staged instead."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from kvatlas import AtlasError, Code
from kvatlas.geometry import DType
from kvatlas.planning import Plan
from kvatlas.routing import Copy, scattered
from kvatlas.routing.binding import Starts
from kvatlas.specs.cell_formats import ElementCast
from kvatlas.wire import Memory, Session
from kvatlas.wire.protocol import Release
from kvatlas.wire.transports.cuda import CudaTransport
from tests.planning.models import model_of
from tests.routing import oracle
from tests.routing.cases import small_plan
from tests.routing.converting import assert_converted, conversion_of, fill_sources, scales_of
from tests.routing.test_conversion import attention
from tests.wire.test_conversion import hybrid
from tests.wire.transports.ends import eventually
from tests.wire.transports.fake_cuda import FakeCuda, FakeMachine, node_of

TOKENS = 40


def dense(cache: str, **ask: Any) -> Plan:
    return small_plan(model_of("dense", {"attn": attention(cache)}), **ask)


class Ends:
    """All ranks of a source and one destination, each a process of its own, without staging."""

    def __init__(self, stack: ExitStack, src: Plan, dst: Plan) -> None:
        machine, rng, named = FakeMachine(), np.random.default_rng(4), conversion_of(src, dst)
        tables = scattered(src, TOKENS), scattered(dst, TOKENS)
        self.move = oracle.Move(src, dst, tables[0], tables[1], (0, TOKENS))
        memories, self.numbers = fill_sources(self.move, rng)

        def node(made: Plan, rank: int) -> Any:
            about: Any = {"convert": named, "scales": scales_of(made), "rank": rank}
            return stack.enter_context(node_of(made, machine, rng, **about))

        self.sources = []
        for rank, memory in memories.items():
            source, pools, _ = node(src, rank)
            for index, pool in memory.pools.items():
                pools[index][:] = pool
            self.sources.append(source)
        self.target, self.pools, self.driver = node(dst, 0)
        self.before = self.memory()

    def memory(self) -> oracle.Memory:
        """What the destination holds now."""
        held = oracle.Memory(self.move.destination, 0, np.random.default_rng(0))
        for index, pool in self.pools.items():
            held.pools[index][:] = pool
        return held

    def pull(self, request: str, **about: Any) -> Any:
        endpoints = [source.endpoint for source in self.sources]
        asked: Any = {"destination_blocks": self.move.destination_blocks, "tokens": TOKENS, **about}
        with Session(self.target, endpoints) as session:
            return session.pull(request, **asked).wait(20)

    def offer(self, request: str) -> None:
        for source in self.sources:
            source.offer(request, self.move.source_blocks, TOKENS)

    def assert_right(self) -> None:
        assert_converted(self.move, self.numbers, {0: self.before}, {0: self.memory()})


def test_elements_are_cast_by_the_copy_that_reads_the_peers_pages() -> None:
    """Ranks, orders and blocks are unlike too; neither end has a buffer to stage in."""
    for src, dst in (
        (dense("fp8", tp=2, layout="LBNHC"), dense("bf16", layout="BHLNC", block_size=32)),
        (dense("bf16", layout="BLHNC", block_size=32), dense("fp8", layout="LBHNC")),
        (hybrid("fp8", "fp32", tp=2), hybrid("bf16", "bf16", block_size=32)),
    ):
        with ExitStack() as stack:
            ends = Ends(stack, src, dst)
            ends.offer("r")
            done = ends.pull("r")
            assert done.moved == done.total
            ends.assert_right()
            metrics = ends.target.metrics
            assert metrics.values["gpu_converted_bytes"] == done.total
            assert metrics.seconds["converted"] > 0
            assert "staged" not in metrics.seconds


def test_pulls_of_a_known_shape_are_launched_at_once_and_cast() -> None:
    """The pools are cleared before each pull, and every element is compared with the oracle."""
    for src, dst in (
        (dense("fp8", tp=2, layout="LBNHC"), dense("bf16", layout="BHLNC", block_size=32)),
        (dense("bf16", layout="BLHNC", block_size=32), dense("fp8", layout="LBHNC")),
        (hybrid("fp8", "fp32", tp=2), hybrid("bf16", "bf16", block_size=32)),
    ):
        with ExitStack() as stack:
            ends = Ends(stack, src, dst)
            endpoints = [source.endpoint for source in ends.sources]
            session = stack.enter_context(Session(ends.target, endpoints))
            metrics, blocks = ends.target.metrics, ends.move.destination_blocks
            for turn in range(5):
                ends.driver.log.clear()
                ends.offer(f"r{turn}")
                before = metrics.values.get("gpu_converted_bytes", 0)
                transfer = session.pull(f"r{turn}", destination_blocks=blocks, tokens=TOKENS)
                begun = [what for what, _ in ends.driver.log].count("post")
                assert turn < 2 or begun == len(endpoints), "launched by who asked"
                done = transfer.wait(20)
                assert done.moved == done.total
                ends.assert_right()
                for pool in ends.pools.values():  # the next pull writes everything again
                    pool[:] = 0
                ends.before = ends.memory()
                found: list[Any] = [session._connections.find(one) for one in endpoints]
                if turn < 2:
                    assert eventually(lambda: all(one.shapes._pulled > turn for one in found))  # noqa: B023
                if turn == 1:
                    assert eventually(lambda: all(one.shapes._kept for one in found))  # noqa: B023
                total = before + done.total
                assert eventually(lambda: metrics.values["gpu_converted_bytes"] == total)  # noqa: B023


def test_layers_are_cast_as_they_are_written() -> None:
    with ExitStack() as stack:
        ends = Ends(stack, dense("bf16", layout="BLHNC"), dense("fp8", block_size=32))
        (source,) = ends.sources
        source.offer("r", ends.move.source_blocks, TOKENS, layered=True)
        for name in source.plan.layers:
            source.layer_written("r", name)
        done = ends.pull("r", streamed=True)
        assert done.layers == set(source.plan.layers)
        ends.assert_right()


def test_what_cannot_be_cast_on_the_way_is_staged() -> None:
    """Which neither end can, without buffers: it is said before anything is posted."""
    cases: list[tuple[str, dict[str, Any], set[str]]] = [
        ("int8_per_token_head", {}, set()),
        ("fp8", {"checksums": True}, set()),
        ("fp8", {"how": "staged"}, set()),
        ("fp8", {}, {"e4m3"}),
    ]
    for cache, about, lacks in cases:
        with ExitStack() as stack:
            ends = Ends(stack, dense("bf16"), dense(cache))
            ends.driver.lacks |= lacks
            ends.offer("r")
            with pytest.raises(AtlasError) as refused:
                ends.pull("r", **about)
            assert refused.value.code is Code.TOO_MANY
            assert "post" not in dict(ends.driver.log)


def test_runs_of_elements_stay_inside_and_at_their_multiples() -> None:
    machine = FakeMachine()
    cast = ElementCast(DType.of("bf16"), DType.of("fp32"))
    ends = []
    for odd in (0, 1):
        driver = FakeCuda(machine)
        whole, _ = driver.allocate(65)
        transport = CudaTransport(driver=driver, share=1.0)
        transport.register({0: Memory(whole.address, 64, "cuda:0")})
        if odd:
            transport.register({1: Memory(whole.address + 1, 64, "cuda:0")})
        ends.append(transport)
    target, source = ends
    link = target.connect(source.publish(), source.memory)
    none = np.zeros(1, np.int64)
    for pool, first, code in ((0, 1, Code.OUT_OF_BOUNDS), (1, 0, Code.WIRE_FAILED)):
        spans = none, none + first, none + 16
        grid = Copy(pool, 0, *spans, starts=Starts.of(none, none), cast=cast)
        assert link.converts([grid]) == (pool == 0)
        with pytest.raises(AtlasError) as refused:
            link.read([grid])
        assert refused.value.code is code
    link.close()
    for one in ends:
        one.close()


def test_who_cannot_have_read_what_it_saw_lets_go() -> None:
    """Rows are converted by their source alone: a word of who saw the offer is no read."""
    for cache, shared, reason in (
        ("fp8", "all", "read"),
        ("fp8", "staging", "let_go"),
        ("int8_per_token_head", "all", "let_go"),
    ):
        with ExitStack() as stack:
            ends = Ends(stack, dense("bf16"), dense(cache))
            (source,), why = ends.sources, list[str]()
            source.offer(
                "r",
                ends.move.source_blocks,
                TOKENS,
                released=lambda *end, why=why: why.append(end[1]),
            )
            with Session(ends.target, [source.endpoint]) as session:
                source.transport.shared = shared
                connection = session._connections.find(source.endpoint)
                assert connection is not None
                word = {"read": True, "posting": source.posting("r")}
                said = Release(session=connection.session, request="r", **word)
                deadline = time.monotonic() + 5
                ends.target.channels.ask(source.endpoint, said, deadline=deadline)
            assert why == [reason]
