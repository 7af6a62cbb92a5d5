"""A pool's events at Dynamo's indexer: it finds as much of a prompt as the pool does.

The indexer is a server of its own, which listens on all interfaces: `make test-dynamo` is for
machines that nobody else reaches. It knows one block size for a model, and only groups that
keep every token; of a hybrid it knows the attention, so its answer is what that could serve.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from kvatlas.pool import BlockPool, EventPublisher, HashChain, PrefixIdentity
from kvatlas.pool.prefix_index import GroupIndex
from tests.pool.engine import PIECES, PLANS

pytest.importorskip("dynamo.llm")

BLOCK = 16
WAIT = 60.0


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Indexer:
    """Dynamo's indexer as a process, and what it is asked."""

    def __init__(self) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(self.port)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.workers = 0
        wait_for(self.is_up)

    def is_up(self) -> bool:
        try:
            with urlopen(f"http://127.0.0.1:{self.port}/health", timeout=10):
                return True
        except URLError:
            return False

    def answer(self, path: str, body: Any) -> bytes:
        kind = {"content-type": "application/json"}
        asked = Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), kind)
        with urlopen(asked, timeout=10) as answered:  # noqa: S310
            return bytes(answered.read())

    def listen(self, model: str, publisher: EventPublisher) -> None:
        self.workers += 1
        worker = {
            "instance_id": self.workers, "model_name": model, "block_size": BLOCK,
            "endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint,
        }  # fmt: skip
        self.answer("/register", worker)

    def longest(self, model: str, tokens: list[int]) -> int:
        answer = json.loads(self.answer("/query", {"model_name": model, "token_ids": tokens}))
        return max((one["longest_matched"] for one in answer["instances"].values()), default=0)


def knows(indexer: Indexer, publisher: EventPublisher, model: str, tokens: list[int]) -> bool:
    """Whether the indexer has heard of a prompt; that it missed something it sees from the next."""
    publisher([])
    return indexer.longest(model, tokens) == len(tokens)


def wait_for(seen: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not seen():
        assert time.monotonic() < end, "Dynamo's indexer does not get there"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def indexer() -> Iterator[Indexer]:
    started = Indexer()
    yield started
    started.process.terminate()
    started.process.wait(10)


def drawn_prompt(dice: Random) -> list[int]:
    return [token for _ in range(dice.randint(1, 5)) for token in dice.choice(PIECES)]


def serve(pool: BlockPool, name: object, prompt: list[int]) -> None:
    pool.admit(name, prompt)
    for stop in [*pool.stops(name, len(prompt)), len(prompt)]:
        pool.reserve(name, stop)
        pool.computed(name, stop)
    pool.free(name)


def chain_of(tokens: list[int]) -> HashChain:
    chain = HashChain(PrefixIdentity(), BLOCK)
    chain.extend(tokens)
    return chain


@pytest.mark.parametrize("name", ["dense", "sliding", "hybrid"])
def test_the_indexer_finds_what_the_pool_finds(indexer: Indexer, name: str) -> None:
    dice = Random(11)  # noqa: S311
    compared = found = shorter = 0
    with EventPublisher("tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*") as publisher:
        pool = BlockPool(PLANS[name], events=publisher, partial_hits=False)
        (main,) = [one for one in pool._index.groups if one.keeps_all]
        for number in range(20):  # before it listens: it asks for these
            serve(pool, number, drawn_prompt(dice))
        indexer.listen(name, publisher)
        for step in range(40):
            for number in range(dice.randint(1, 10)):
                serve(pool, number, drawn_prompt(dice))
            if dice.random() < 0.1:
                pool.clear()
            last = [1000 + step] * BLOCK
            serve(pool, "last", last)
            wait_for(partial(knows, indexer, publisher, name, last))
            for _ in range(10):
                prompt = drawn_prompt(dice)
                expected = attention(main, prompt)
                assert indexer.longest(name, prompt) == expected
                hit = pool.match(chain_of([*prompt, 0]))  # its last token is always computed
                assert hit <= expected
                assert name != "dense" or hit == expected
                compared, found = compared + 1, found + (hit > 0)
                shorter += hit < expected
    print(f"{name}: {compared} prompts, {found} hits, {shorter} where other groups serve less")
    assert found > 20


def attention(index: GroupIndex, prompt: list[int]) -> int:
    """What the group that keeps every token could serve."""
    return index.reach(chain_of(prompt), len(prompt))
