"""Prefill in one process and topology, decode in another: the tokens of an undisturbed run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvatlas import AtlasError
from kvatlas.engines.transformers import AtlasCache, make_plan
from kvatlas.engines.transformers.simulated_ranks import SimulatedRanks
from kvatlas.models import CacheIdentity
from kvatlas.routing import route, scattered
from kvatlas.tier import FolderStore, StoreTier, Tier, prefix_keys
from kvatlas.wire import Session, make_transport
from tests.handover.prefill import MARK
from tests.handover.tiny import LONGEST, MODELS, NEW, PROMPT, model_of, prompt
from tests.profiles import DEEP

ROOT = Path(__file__).parents[2]

TOPOLOGIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp 2 to 1": ({"tp": 2, "layout": "LBNHC"}, {"tp": 1, "layout": "BHLNC", "block_size": 32}),
    "tp 1 to 2": ({"tp": 1, "layout": "BLHNC"}, {"tp": 2, "layout": "LBHNC"}),
    "tp 2 to 3": ({"tp": 2, "layout": "BHLNC"}, {"tp": 3, "layout": "BLNHC", "block_size": 32}),
    "pp 2 to 1": ({"pp": 2, "layout": "LBHNC", "block_size": 32}, {"tp": 2, "layout": "BLHNC"}),
}
HYBRIDS = ("delta hybrid", "mamba hybrid")


class Prefill:
    """The other process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.handover.prefill"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip

    def __call__(self, **task: Any) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(task) + "\n")
        stdin.flush()
        line = next((said for said in stdout if said.startswith(MARK)), None)
        assert line is not None, "the prefill process has ended"
        answer: dict[str, Any] = json.loads(line[len(MARK) :])
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


@pytest.fixture(scope="module")
def prefill() -> Iterator[Prefill]:
    made = Prefill()
    yield made
    made.close()


def available(transport: str) -> None:
    try:
        make_transport(transport).close()
    except AtlasError as missing:
        pytest.skip(f"{transport}: {missing}")


@lru_cache
def undisturbed(name: str, number: int) -> list[int]:
    """What the model says when nobody moves its cache."""
    with torch.no_grad():
        ids = model_of(name).generate(prompt(number), max_new_tokens=NEW, do_sample=False)
    return ids[0, PROMPT:].tolist()  # type: ignore[no-any-return]


@lru_cache
def own_cache(name: str, number: int) -> AtlasCache:
    """The cache of the prompt, made here."""
    model = model_of(name)
    cache = AtlasCache.from_config(model.config, batch=1, max_len=LONGEST)
    with torch.no_grad():
        model.generate(prompt(number), past_key_values=cache, max_new_tokens=1, do_sample=False)
    return cache


def go_on(
    name: str, ranks: SimulatedRanks, blocks: dict[int, list[int]], number: int, first: int
) -> Any:
    """The tokens from the first one on, on what the ranks hold."""
    model = model_of(name)
    cache = AtlasCache.from_config(model.config, batch=1, max_len=LONGEST, layout="LBHNC")
    ranks.copy_to(cache, blocks, PROMPT)
    ids = torch.cat((prompt(number), torch.tensor([[first]])), dim=1)
    with torch.no_grad():
        ids = model.generate(ids, past_key_values=cache, max_new_tokens=NEW - 1, do_sample=False)
    return ids[0, PROMPT:].tolist()


def plans(name: str, topology: str) -> tuple[dict[str, Any], dict[str, Any]]:
    src, dst = (dict(end) for end in TOPOLOGIES[topology])
    if name in HYBRIDS:
        src["pack"], dst["pack"] = 1, 2
        for end in (src, dst):
            end.pop("block_size", None)  # hybrids find their own
    return src, dst


def pull(ranks: SimulatedRanks, endpoints: list[str], **options: Any) -> dict[int, list[int]]:
    blocks = scattered(ranks.plan, PROMPT)
    for node in ranks.nodes:
        with Session(node, endpoints) as session:
            options = {"destination_blocks": blocks, "tokens": PROMPT, "timeout": 60, **options}
            transfer = session.pull("request", **options).wait()
            assert transfer.ready
    return blocks


CASES = [
    (name, topology, transport)
    for i, name in enumerate(MODELS)
    for j, topology in enumerate(TOPOLOGIES)
    for k, transport in enumerate(("shm", "nixl", "mooncake"))
    # Each model has one topology and one transport; in the deep profile it has all of them.
    if DEEP or (j == i % 4 and k == i % 3)
]


@pytest.mark.parametrize(("name", "topology", "transport"), CASES)
def test_tokens_after_a_hand_over(
    name: str, topology: str, transport: str, prefill: Prefill
) -> None:
    available(transport)
    src, dst = plans(name, topology)
    said = prefill(model=name, plan=src, transport=transport, prompts=[5])
    plan = make_plan(model_of(name).config, batch=4, max_len=LONGEST, **dst)
    with SimulatedRanks(
        plan, transport, name="decode", model=model_of(name), secret=b"shared by both ends"
    ) as ranks:
        how = {"how": "direct"} if topology == "tp 1 to 2" else {}
        blocks = pull(ranks, said["endpoints"], checksums=True, **how)
        same_bytes(name, ranks, blocks)
        assert go_on(name, ranks, blocks, 5, said["first"]["5"]) == undisturbed(name, 5)
        assert all(len(node.leases) == 0 for node in ranks.nodes)


@pytest.mark.parametrize("name", list(MODELS) if DEEP else list(MODELS)[::2])
def test_tokens_after_a_hand_over_within_a_process(name: str) -> None:
    """The memory transport: both ends here, pushed rather than pulled."""
    src, dst = plans(name, "tp 2 to 1")
    made = [make_plan(model_of(name).config, batch=4, max_len=LONGEST, **p) for p in (src, dst)]
    with (
        SimulatedRanks(made[0], "memory", name="prefill", model=model_of(name)) as prefilled,
        SimulatedRanks(made[1], "memory", name="decode", model=model_of(name)) as ranks,
    ):
        blocks = prefilled.copy_from(own_cache(name, 5), PROMPT)
        mine = scattered(ranks.plan, PROMPT)
        names = [node.name for node in prefilled.nodes]
        waiting = [
            n.expect("request", mine, PROMPT, source=made[0], pushers=names) for n in ranks.nodes
        ]
        for node in prefilled.nodes:
            with Session(node, ranks.endpoints) as session:
                session.push("request", source_blocks=blocks, tokens=PROMPT).wait(30)
        assert all(expected.ready.is_set() for expected in waiting)
        first = undisturbed(name, 5)[0]
        assert go_on(name, ranks, mine, 5, first) == undisturbed(name, 5)


@pytest.mark.parametrize("name", list(MODELS) if DEEP else list(MODELS)[1::2])
def test_tokens_after_a_stay_on_disk(name: str, tmp_path: Path) -> None:
    """Stored by two ranks, the file closed and opened again, loaded by one of another plan."""
    src, dst = plans(name, "tp 2 to 1")
    config = model_of(name).config
    made = [make_plan(config, batch=4, max_len=LONGEST, **p) for p in (src, dst)]
    rows = make_plan(config, batch=4, max_len=LONGEST, layout="BLHNC")
    keys = {
        group: [f"{group} {number}".encode() for number in range(-(-PROMPT // one.block))]
        for group, one in enumerate(rows.groups)
    }
    path = tmp_path / "blocks"
    with (
        SimulatedRanks(made[0], "memory", name="prefill", model=model_of(name)) as prefilled,
        SimulatedRanks(made[1], "memory", name="decode", model=model_of(name)) as ranks,
    ):
        blocks = prefilled.copy_from(own_cache(name, 5), PROMPT)
        with Tier.open(path, rows) as tier:
            for rank, pools in prefilled.pools.items():
                tier.store(pools, made[0], rank=rank, blocks=blocks, tokens=PROMPT, keys=keys)
        mine = scattered(ranks.plan, PROMPT)
        with Tier.open(path) as tier:
            for rank, pools in ranks.pools.items():
                tier.fetch(pools, made[1], rank=rank, blocks=mine, tokens=PROMPT, keys=keys)
        first = undisturbed(name, 5)[0]
        assert go_on(name, ranks, mine, 5, first) == undisturbed(name, 5)


@pytest.mark.parametrize("name", MODELS if DEEP else ["delta hybrid"])
def test_tokens_agree_through_a_store_that_two_topologies_share(name: str, tmp_path: Path) -> None:
    src, dst = plans(name, "tp 2 to 3")
    config = model_of(name).config
    made = [make_plan(config, batch=2, max_len=LONGEST, **end) for end in (src, dst)]
    rows = make_plan(config, batch=2, max_len=LONGEST, layout="BLHNC")
    ours = CacheIdentity(weights=f"the weights of {name}")

    def opened() -> StoreTier:
        return StoreTier(FolderStore(tmp_path), rows, ours, shards=6, staging=1 << 20)

    with (
        SimulatedRanks(made[0], "memory", name="prefill", model=model_of(name)) as prefilled,
        SimulatedRanks(made[1], "memory", name="decode", model=model_of(name)) as ranks,
    ):
        blocks = prefilled.copy_from(own_cache(name, 5), PROMPT)
        with opened() as tier:
            keys = prefix_keys(tier.plan, prompt(5)[0].tolist())
            for rank, pools in prefilled.pools.items():
                tier.store(pools, made[0], rank=rank, blocks=blocks, tokens=PROMPT, keys=keys)
        mine = scattered(ranks.plan, PROMPT)
        with opened() as tier:
            for rank, pools in ranks.pools.items():
                tier.fetch(pools, made[1], rank=rank, blocks=mine, tokens=PROMPT, keys=keys)
        assert go_on(name, ranks, mine, 5, undisturbed(name, 5)[0]) == undisturbed(name, 5)


def same_bytes(name: str, ranks: SimulatedRanks, blocks: dict[int, list[int]]) -> None:
    """What arrived is what this process would have computed and placed there."""
    with SimulatedRanks(ranks.plan, "memory", name="expected", model=model_of(name)) as expected:
        assert expected.copy_from(own_cache(name, 5), PROMPT) == blocks
        way = route(ranks.plan, ranks.plan)
        for rank, pools in ranks.pools.items():
            needs = way.needs(destination_rank=rank, destination_blocks=blocks, tokens=PROMPT)
            for pool, (starts, lengths) in needs.items():
                for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
                    place = slice(start, start + length)
                    assert np.array_equal(pools[pool][place], expected.pools[rank][pool][place])


@pytest.mark.parametrize("name", MODELS if DEEP else list(MODELS)[::3])
def test_another_requests_cache_gives_other_tokens(name: str, prefill: Prefill) -> None:
    """The negative control: were the cache of no consequence, nothing above would mean much."""
    src, dst = plans(name, "tp 2 to 1")
    said = prefill(model=name, plan=src, transport="shm", prompts=[5, 6])
    plan = make_plan(model_of(name).config, batch=4, max_len=LONGEST, **dst)
    with SimulatedRanks(
        plan, "shm", name="decode", model=model_of(name), secret=b"shared by both ends"
    ) as ranks:
        blocks = pull(ranks, said["endpoints"])
        other = go_on(name, ranks, blocks, 5, undisturbed(name, 5)[0])
        assert other[1:] != undisturbed(name, 5)[1:]
