"""Engines that die, stall or are not asked: what was not read is computed, and no block is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.comparing import (
    assert_nothing_held,
    assert_same,
    atlas,
    prompt,
    split,
    undisturbed,
)
from tests.vllm.engine_process import Answer, Engine, engine
from tests.vllm.models import checkpoint

TIMES = 5
LEASE = 4.0
TOKENS = 900
SLOW: dict[str, Any] = {"how": "staged", "piece": 4096, "buffers": 2}
"""Hundreds of pieces, one after the other: there is time to strike between them."""
QUICK: dict[str, Any] = {"wait_for_offer": 0.5, "lease_seconds": LEASE}


@pytest.fixture(scope="module")
def model(checkpoints: Path) -> Path:
    return checkpoint("gemma3", checkpoints)


@pytest.fixture(scope="module")
def right(model: Path) -> Answer:
    return undisturbed(model, [prompt(TOKENS)])[0]


@pytest.fixture(scope="module")
def recomputing(model: Path) -> Iterator[Engine]:
    """A decode engine that computes what it cannot read."""
    about = atlas("recompute", **QUICK, **SLOW)
    with engine(model, name="recompute", core="1", connector=about, block_size=128) as made:
        yield made


@pytest.fixture(scope="module")
def failing(model: Path) -> Iterator[Engine]:
    """A decode engine that fails what it cannot read."""
    about = atlas("fail", **QUICK, **SLOW)
    with engine(model, name="fail", core="1", connector=about, block_size=128) as made:
        yield made


@pytest.fixture(scope="module")
def living(model: Path) -> Iterator[Engine]:
    """A prefill engine that is not killed."""
    with prefilling(model) as made:
        yield made


def prefilling(model: Path, **settings: Any) -> Any:
    about = atlas(**QUICK | SLOW | {"buffers": 8} | settings)  # for several who read at once
    return engine(model, name="prefill", core="0", connector=about, block_size=64)


def arriving(facts: dict[str, Any]) -> bool:
    """Whether a request has arrived in part."""
    return bool(facts["moving"])


def test_killed_before_a_pull(
    model: Path, right: Answer, recomputing: Engine, failing: Engine, living: Engine
) -> None:
    tokens = prompt(TOKENS)
    for _ in range(TIMES):
        with prefilling(model) as prefill:
            lost = [prefill.prefill(tokens).params for _ in range(2)]
            prefill.kill()
        assert_same(right, recomputing.generate(tokens, params=lost[0]), "recomputed")
        other = living.prefill(tokens).params
        names = [failing.add(tokens, params=params) for params in (lost[1], other)]
        assert failing.wait(names[0]).reason == "error"
        assert_same(right, failing.wait(names[1]), "the other request")
        assert_nothing_held(recomputing, failing, living)


def read_at_once(prefill: Engine, decodes: tuple[Engine, ...], tokens: list[int]) -> list[str]:
    """Requests of all decode engines that have arrived in part."""
    for _ in range(5):
        params = [prefill.prefill(tokens).params for _ in decodes]
        names = [one.add(tokens, params=told) for one, told in zip(decodes, params, strict=True)]
        facts = [one.facts() for one in decodes]
        while all(one["requests"] for one in facts):
            if all(map(arriving, facts)):
                return names
            facts = [one.facts() for one in decodes]
        for one, name in zip(decodes, names, strict=True):  # one was too quick for the other
            one.wait(name)
    raise AssertionError("they never read at once")


def test_killed_during_a_pull(
    model: Path, right: Answer, recomputing: Engine, failing: Engine
) -> None:
    tokens, decodes = prompt(TOKENS), (recomputing, failing)
    for _ in range(TIMES):
        with prefilling(model) as prefill:
            for one in decodes:  # so that they are connected, and both read at once
                split(prefill, one, prompt(70))
            names = read_at_once(prefill, decodes, tokens)
            prefill.kill()
        alone = failing.add(tokens)
        assert_same(right, recomputing.wait(names[0]), "recomputed")
        assert failing.wait(names[1]).reason == "error"
        assert_same(right, failing.wait(alone), "the other request")
        assert_nothing_held(recomputing, failing)


def test_killed_after_a_pull(
    model: Path, right: Answer, recomputing: Engine, failing: Engine
) -> None:
    tokens = prompt(TOKENS)
    for _ in range(TIMES):
        with prefilling(model) as prefill:
            names = []
            for one in (recomputing, failing):
                names.append(one.add(tokens, params=prefill.prefill(tokens).params))
                one.until(arriving)
                one.until(lambda facts: not facts["moving"])
            assert_nothing_held(prefill)
            prefill.kill()
        for one, name in zip((recomputing, failing), names, strict=True):
            assert_same(right, one.wait(name), "read before")
        assert_nothing_held(recomputing, failing)


def test_requests_that_are_aborted_at_either_engine(
    right: Answer, recomputing: Engine, living: Engine
) -> None:
    tokens = prompt(TOKENS)
    # At the prefill engine: before it has begun, and after its blocks were offered.
    living.abort(living.add(tokens, tokens=1, params={"do_remote_decode": True}))
    assert_nothing_held(living)
    name = living.add(tokens, tokens=1, params={"do_remote_decode": True})
    params = living.wait(name).params
    living.abort(name)
    assert living.facts()["requests"] == 1, "what was offered may still be read"
    assert_same(right, recomputing.generate(tokens, params=params), "offered and aborted")
    assert_nothing_held(living)
    # At the decode engine: while it waits for what does not come, in the middle, and at once.
    waiting = recomputing.add(tokens, params=forged(living.prefill(tokens).params))
    recomputing.until(lambda facts: facts["requests"] > 0)
    recomputing.abort(waiting)
    for _ in range(TIMES):
        name = recomputing.add(tokens, params=living.prefill(tokens).params)
        recomputing.until(arriving)
        recomputing.abort(name)
        recomputing.abort(recomputing.add(tokens, params=living.prefill(tokens).params))
    begun = time.monotonic()
    assert_nothing_held(recomputing, living)
    assert time.monotonic() < begun + 10 * LEASE
    assert_same(right, split(living, recomputing, tokens), "after aborts")


def test_what_nobody_reads_is_free_after_its_lease(
    right: Answer, recomputing: Engine, failing: Engine, living: Engine
) -> None:
    tokens = prompt(TOKENS)
    late = living.prefill(tokens).params
    assert living.facts()["requests"] == 1
    assert_nothing_held(living)
    assert_same(right, recomputing.generate(tokens, params=late), "expired, and computed")
    lost = failing.add(tokens, params=forged(late))
    other = failing.add(tokens, params=living.prefill(tokens).params)
    assert failing.wait(lost).reason == "error"
    assert_same(right, failing.wait(other), "the other request")
    assert_nothing_held(recomputing, failing, living)


def test_a_decode_engine_that_is_killed_and_starts_again(
    model: Path, right: Answer, living: Engine
) -> None:
    tokens = prompt(TOKENS)
    about = atlas(**QUICK, **SLOW)
    for _ in range(2):
        with engine(model, name="again", core="1", connector=about, block_size=128) as decode:
            assert_same(right, split(living, decode, tokens), "started again")
            decode.add(tokens, params=living.prefill(tokens).params)
            decode.until(arriving)
            decode.kill()
        assert_nothing_held(living)


def test_engines_that_must_not_read_from_each_other(
    model: Path, right: Answer, living: Engine, checkpoints: Path, tmp_path: Path
) -> None:
    """Another secret, and another model under the same prompt: computed, and said why."""
    tokens = prompt(TOKENS)
    secrets = [tmp_path / name for name in ("secret", "other")]
    for path in secrets:
        path.write_text(path.name * 8)
    asking = [atlas("recompute", **QUICK, secret_file=str(path)) for path in secrets]
    with (
        engine(model, name="asks", core="1", connector=asking[0], block_size=128) as decode,
        engine(model, name="other", core="0", connector=asking[1], block_size=64) as prefill,
    ):
        for source in (living, prefill):
            got = decode.generate(tokens, params=source.prefill(tokens).params)
            assert_same(right, got, "another secret")
            assert "read failed" in decode.facts()["warned"]
        assert_nothing_held(decode, prefill, living)
    unlike = checkpoint("llama", checkpoints)
    alone = undisturbed(unlike, [tokens])[0]
    about = atlas("recompute", **QUICK)
    with engine(unlike, name="unlike", core="1", connector=about, block_size=64) as decode:
        assert_same(alone, decode.generate(tokens, params=living.prefill(tokens).params), "unlike")
        warned = decode.facts()["warned"]
        assert model.name in warned, warned
        assert unlike.name in warned, warned
        assert_nothing_held(decode, living)


def forged(params: dict[str, Any] | None) -> dict[str, Any]:
    """Parameters of a request that nobody offers."""
    assert params is not None
    about = {**params["kvatlas"], "request": "that nobody offers"}
    return {**params, "kvatlas": about}
