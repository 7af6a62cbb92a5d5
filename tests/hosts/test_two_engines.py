"""Two vLLM engines on two hosts, as the example and the documentation start them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvatlas.errors import Code
from tests.hosts.engine_hosts import (
    DECODE,
    EXAMPLE,
    HTTP,
    PREFILL,
    PROXY,
    TwoHosts,
    greedy,
    why_not,
    words_of,
)

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

TOKENS = 8
_PARTITION_SECONDS = 10.0


def prompts(count: int, seed: int) -> list[str]:
    chosen = random.Random(seed)  # noqa: S311
    lengths = [chosen.choice((40, 130, 257, 400)) for _ in range(count)]
    return [" ".join(f"w{chosen.randrange(1, 512)}" for _ in range(length)) for length in lengths]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    made = TwoHosts(tmp_path)
    try:
        yield made
    finally:
        made.close()


def asked(hosts: TwoHosts, weights: str, count: int, seed: int) -> int:
    """Send new prompts through the proxy. The tokens are right; return how many were read."""
    given = prompts(count, seed)
    right = greedy(hosts.folder / weights, given, TOKENS)
    before = hosts.counters()
    for prompt, expected in zip(given, right, strict=True):
        assert words_of(hosts.complete(prompt, max_tokens=TOKENS)) == expected
    return int(hosts.counters().get("pulls", 0) - before.get("pulls", 0))


def test_engines_on_two_hosts_survive_what_happens_to_hosts(hosts: TwoHosts) -> None:
    for host in (PREFILL, DECODE):
        hosts.network.limit(host, "1gbit")
    hosts.share_secret()
    for host in (PREFILL, DECODE):
        said = hosts.run(host, str(EXAMPLE / "serve.sh"), "check")
        assert "These engines can exchange caches" in said, said
        assert "encrypted" in said, said

    # The prefill engine and the proxy start by the script, the decode engine by the page.
    hosts.serve(PREFILL, "prefill")
    hosts.serve_documented(DECODE, "decode")
    hosts.serve(DECODE, "proxy")
    hosts.await_part(PREFILL, HTTP[PREFILL], "prefill")
    hosts.await_part(DECODE, HTTP[DECODE], "decode")
    hosts.await_part(DECODE, PROXY, "proxy")
    for role in ("prefill", "decode"):
        assert "transport tcp: this host has no RDMA device" in hosts.log(role)
    assert asked(hosts, "first", 3, seed=1) == 3

    # A partition: requests that are under way, and new ones, end with the right tokens.
    hosts.network.set_up(PREFILL, up=False)
    healed = threading.Timer(_PARTITION_SECONDS, hosts.restore, [PREFILL])
    healed.start()
    asked(hosts, "first", 2, seed=2)
    healed.join()
    time.sleep(1)
    assert asked(hosts, "first", 2, seed=3) == 2

    # The prefill host vanishes with a request that it has prefilled, and later by itself.
    (prompt,), port = prompts(1, seed=4), HTTP[PREFILL]
    remote = {"kv_transfer_params": {"do_remote_decode": True}}
    handed = hosts.complete(prompt, port=port, host=PREFILL, max_tokens=1, **remote)
    hosts.kill(PREFILL)
    params = {"kv_transfer_params": handed["kv_transfer_params"]}
    answer = hosts.complete(prompt, port=HTTP[DECODE], max_tokens=TOKENS, **params)
    assert [words_of(answer)] == greedy(hosts.folder / "first", [prompt], TOKENS)
    assert asked(hosts, "first", 2, seed=5) == 0

    # It comes back, this time by the page's file.
    hosts.restore(PREFILL)
    hosts.serve_documented(PREFILL, "prefill")
    hosts.await_part(PREFILL, port, "prefill")
    assert asked(hosts, "first", 2, seed=6) == 2

    # A rolling update: one engine after the other serves other weights.
    hosts.serve_weights("second")
    hosts.end(PREFILL)
    hosts.serve(PREFILL, "prefill")
    hosts.await_part(PREFILL, port, "prefill")
    assert asked(hosts, "first", 2, seed=7) == 0
    assert Code.DIFFERENT_IDENTITY in hosts.log("decode")
    hosts.end(DECODE)
    hosts.serve(DECODE, "decode")
    hosts.await_part(DECODE, HTTP[DECODE], "decode")
    assert asked(hosts, "second", 2, seed=8) == 2
