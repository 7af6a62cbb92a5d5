"""Engines with data-parallel ranks: each is an engine of its own to those that read from it."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.comparing import Undisturbed, assert_nothing_held, assert_same, atlas, prompt
from tests.vllm.data_parallel import Asked, data_parallel_engine
from tests.vllm.engine_process import engine
from tests.vllm.models import checkpoint

RANKS = (0, 1)
LENGTHS = (65, 191, 257, 517)


def ports_in_a_row(count: int) -> int:
    """The first of so many ports that nobody has."""
    while True:
        with ExitStack() as held, socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                for number in range(1, count):
                    one = held.enter_context(socket.socket())
                    one.bind(("127.0.0.1", port + number))
            except (OSError, OverflowError):
                continue
            return port


@pytest.mark.parametrize("tp", [1, 2])
def test_every_data_parallel_rank_reads_and_is_read(
    tp: int, checkpoints: Path, right: Undisturbed
) -> None:
    """From and to one engine, and from one rank to another, alone and many at once."""
    model, answers = checkpoint("gemma3", checkpoints), right("gemma3")
    first_port = ports_in_a_row(2 * tp)
    several: dict[str, Any] = {"block_size": 64, "tensor_parallel_size": tp}
    with (
        data_parallel_engine(
            model, name="many", connector=atlas(ports=first_port), **several
        ) as many,
        engine(model, name="one", core="1", connector=atlas(), block_size=128) as one,
    ):
        names = set()
        for rank in RANKS:
            for length in LENGTHS:
                tokens = prompt(length)
                told = many.prefill(tokens, rank).params or {}
                ports = [first_port + rank * tp + number for number in range(tp)]
                assert told["kvatlas"]["endpoints"] == [f"tcp://127.0.0.1:{at}" for at in ports]
                names.add(told["remote_engine_id"])
                assert_same(answers[length], one.generate(tokens, params=told), (rank, length))
                (got,) = many.generate(Asked(tokens, rank, params=one.prefill(tokens).params))
                assert_same(answers[length], got, (length, rank))
        assert len(names) == len(RANKS), "names of unlike ranks"
        assert many.pulls() == [tp * len(LENGTHS)] * len(RANKS), "nothing was computed instead"
        begun = [(length, many.prefill(prompt(length), 0).params) for length in LENGTHS]
        begun += [(length, one.prefill(prompt(length)).params) for length in LENGTHS]
        asked = [Asked(prompt(length), 1, params=told) for length, told in begun[: len(LENGTHS)]]
        asked += [Asked(prompt(length), params=told) for length, told in begun[len(LENGTHS) :]]
        for (length, _), got in zip(begun, many.generate(*asked), strict=True):
            assert_same(answers[length], got, ("at once", length))
        assert sum(many.pulls()) == 4 * tp * len(LENGTHS)
        assert not one.facts()["warned"]
        many.wait_until_nothing_is_held()
        assert_nothing_held(one)


def test_data_parallel_ranks_find_what_another_has_stored(
    checkpoints: Path, right: Undisturbed, tmp_path: Path
) -> None:
    model, answer = checkpoint("llama", checkpoints), right("llama")[517]
    keeping = atlas(transport="none", tier=str(tmp_path / "prefixes.tier"), tier_memory="16MiB")
    with data_parallel_engine(model, name="many", connector=keeping, block_size=64) as many:
        for rank, found in ((0, 0), (1, 512)):
            (got,) = many.generate(Asked(prompt(517), rank))
            assert_same(answer, got, rank)
            assert got.cached == found, rank
            many.wait_until_nothing_is_held()
