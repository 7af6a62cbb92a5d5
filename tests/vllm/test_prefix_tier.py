"""Both sides of the connector around a tier, without vLLM: what is found, kept and let go when."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvatlas import AtlasError
from kvatlas.copying import Memory, copy_request, memory_copy
from kvatlas.copying.gpu_offload import HostPins
from kvatlas.engines.vllm import describe_stage, prefix_tier, tier_worker
from kvatlas.engines.vllm.describe import described_model, join_stages
from kvatlas.engines.vllm.ended_requests import Ended, EndedRequests
from kvatlas.engines.vllm.engine_tier import find_tier, open_tier
from kvatlas.engines.vllm.prefix_tier import PrefixTier
from kvatlas.engines.vllm.scheduler_side import SchedulerSide
from kvatlas.engines.vllm.tier_worker import TierWorker
from kvatlas.engines.vllm.weights_identity import cache_identity
from kvatlas.models import weights_identity
from kvatlas.routing import route
from kvatlas.tier import storage
from tests.vllm.shapes import (
    Blocks,
    Config,
    FullAttentionSpec,
    Group,
    Request,
    SlidingWindowSpec,
    vllm_config,
)
from tests.wire.transports.fake_cuda import FakeCuda, FakeMachine

LAYERS = [["a.0.attn", "a.1.attn"], ["a.2.attn", "a.3.attn"]]
TOKENS = list(range(1000, 1400))
MEMORY = "8MiB"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the scheduler wait for answers that it can do without, on a busy machine too."""
    monkeypatch.setattr(prefix_tier, "_SOON", 10.0)


class EngineWithTier:
    """One engine's memory, its scheduler's and its worker's side, and the tier between them."""

    def __init__(
        self, where: Path | str, *, block: int, seed: int, windows: bool = False, **about: Any
    ) -> None:
        groups = [Group(FullAttentionSpec(block_size=block), LAYERS[0])]
        if windows:
            groups.append(Group(SlidingWindowSpec(block_size=block), LAYERS[1]))
        self.config = Config(groups, num_blocks=24)
        stages = [describe_stage(vllm_config(), self.config)]
        self.plan = join_stages(stages)
        size = self.plan.pools[0].nbytes
        self.pool = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        held = Memory(self.pool.ctypes.data, size, owner=self.pool)
        if "driver" in about:
            held, on_gpu = about["driver"].allocate(size)
            on_gpu[:], self.pool = self.pool, on_gpu
        memory, engine_id = about.get("memory", MEMORY), f"engine {id(self)}"
        opened = open_tier(str(where), memory, described_model(stages), self.plan, engine_id)
        assert opened is not None
        self.ended = EndedRequests()
        self.worker = TierWorker(opened, self.plan, 0, held, self.ended)
        asked = find_tier(str(where), engine_id)
        assert asked is not None
        self.tier = PrefixTier(asked, self.plan.max_len, about.get("identity", b"weights"))
        config = vllm_config()
        config.speculative_config = about.get("guesses")
        self.scheduler = SchedulerSide(config, self.config, tier=self.tier, alone=True)

    def finish(self, tokens: list[int], *tables: list[int], **about: Any) -> bool:
        """A request ends; whether its blocks are kept. They are let go once it is stored."""
        request = asking(tokens, **about)
        self.scheduler.on_new_request(request)
        request.num_computed_tokens = about.get("computed", len(tokens))
        kept, _ = self.scheduler.finished(request, tables)
        self.worker.carry_out(self.scheduler.take_orders())
        if kept:
            assert self.wait().sent == {request.request_id}
        return kept

    def matched(self, request: Any, computed: int = 0) -> int:
        """What the scheduler is told, once it is known."""
        self.scheduler.on_new_request(request)
        deadline = time.monotonic() + 20
        while (answer := self.scheduler.matched_tokens(request, computed))[0] is None:
            assert answer[1] is False
            assert time.monotonic() < deadline
        assert answer[1] == (answer[0] > 0)
        return answer[0]

    def load(self, request: Any, *tables: list[int], external: int) -> Ended:
        self.scheduler.allocated(request, Blocks(*tables), external)
        self.worker.carry_out(self.scheduler.take_orders())
        ended = self.wait()
        self.scheduler.received(ended.received)
        return ended

    def wait(self) -> Ended:
        deadline = time.monotonic() + 20
        while not ((ended := self.ended.take()).sent or ended.received):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return ended

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()


def asking(tokens: list[int], name: str = "r", **about: Any) -> Any:
    request = Request(name, len(tokens), about.get("params"))
    request.prompt_token_ids, request._all_token_ids = list(tokens), list(tokens)
    request.cache_salt = about.get("salt")
    request.num_in_flight_tokens = about.get("in_flight", 0)
    request.status = SimpleNamespace(name=about.get("status", "FINISHED_STOPPED"))
    for key in ("lora_request", "mm_features"):
        setattr(request, key, about.get(key))
    return request


def moved(src: EngineWithTier, dst: EngineWithTier, *ends: list[list[int]], tokens: Any) -> Any:
    """What the other engine's pool should be, by a route that meets no tier."""
    expected = dst.pool.copy()
    tables = [dict(enumerate(end)) for end in ends]
    copy_request(
        route(src.plan, dst.plan), {0: {0: src.pool}}, {0: {0: expected}},
        source_blocks=tables[0], destination_blocks=tables[1], tokens=tokens,
    )  # fmt: skip
    return expected


def test_a_prefix_is_found_by_an_engine_of_other_blocks_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    first = EngineWithTier(path, block=64, seed=1)
    assert first.finish(TOKENS[:300], [3, 9, 1, 7, 5])
    assert not first.finish(TOKENS[:300], [3, 9, 1, 7, 5]), "it is there"
    assert not first.finish(TOKENS[:63], [4]), "no block of it is whole"
    first.close()
    other = EngineWithTier(path, block=128, seed=2)
    request = asking(TOKENS[:200] + [5] * 50)
    assert other.matched(request) == 192
    assert other.matched(request, 128) == 64
    expected = moved(first, other, [[3, 9, 1, 7, 5]], [[6, 2]], tokens=(128, 192))
    ended = other.load(request, [6, 2], external=64)
    assert (ended.received, ended.failed) == ({"r"}, set())
    np.testing.assert_array_equal(other.pool, expected)
    assert other.matched(request) == 0, "a request is read once: what fails is computed"
    counts = other.worker.take_counts()
    assert (counts.tier_loads, counts.tier_tokens, counts.tier_failures) == (1, 64, 0)
    other.close()


def test_caches_on_a_gpu_are_kept_and_read_behind_what_the_engine_has_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeCuda(FakeMachine())
    for room in (tier_worker, storage, memory_copy):
        monkeypatch.setattr(room, "load_driver", lambda: driver)
    monkeypatch.setattr(HostPins, "pin", lambda *_: True)
    for where in ("memory", tmp_path / "tier"):
        first = EngineWithTier(where, block=64, seed=1, driver=driver)
        for act in ("stored", "read"):
            driver.log.clear()
            if act == "stored":
                assert first.finish(TOKENS[:300], [3, 9, 1, 7, 5])
            else:
                request = asking(TOKENS[:200] + [5] * 50)
                assert first.matched(request) == 192
                expected = moved(first, first, [[3, 9, 1]], [[6, 2, 8]], tokens=192)
                assert not first.load(request, [6, 2, 8, 10], external=192).failed
                np.testing.assert_array_equal(first.pool, expected)
            told = [one for one in driver.log if one[0] != "finished"]  # which is but looked at
            (what, event), waited, *copies = told
            assert (what, waited) == ("record", ("synchronize", event)), act
            assert any(name in ("post", "through") for name, _ in copies), driver.log
        first.close()
        assert driver.log[-1][0] == "end"


def test_windows_are_found_where_a_request_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    first = EngineWithTier(path, block=64, seed=1, windows=True)
    kept = [3, 9, 1, 7, 5], [0, 0, 0, 12, 11]
    assert first.finish(TOKENS[:300], *kept)
    assert first.finish(TOKENS[:256] + [8] * 30, [3, 9, 1, 7, 6], [0, 0, 0, 12, 13])
    first.close()
    other = EngineWithTier(path, block=128, seed=2, windows=True)
    assert other.matched(asking(TOKENS[:300], "at the end")) == 0, "the last token is computed"
    assert other.matched(asking(TOKENS[:290], "before the end")) == 0
    assert other.matched(asking([*TOKENS[:299], 7, 7], "another last token")) == 0
    request = asking(TOKENS[:320], "goes on")
    assert other.matched(request) == 300
    src, dst = [list(kept[0]), [-1, -1, -1, 12, 11]], [[6, 2, 8], [-1, 4, 5]]
    expected = moved(first, other, src, dst, tokens=300)
    other.load(request, [6, 2, 8], [0, 4, 5], external=300)
    np.testing.assert_array_equal(other.pool, expected)
    other.close()


def test_only_what_tokens_alone_decide_is_kept_and_found(tmp_path: Path) -> None:
    made = EngineWithTier("memory", block=64, seed=1)
    table = [3, 9, 1, 7, 5]
    for unlike in (
        {"lora_request": "adapter"},
        {"mm_features": ["picture"]},
        {"status": "FINISHED_ERROR"},
        {"in_flight": 260},
    ):
        assert not made.finish(TOKENS[:300], table, **unlike), unlike
    assert made.finish(TOKENS[:300], table, salt="one tenant")
    assert made.matched(asking(TOKENS, "other")) == 0, "another salt's"
    assert made.matched(asking(TOKENS, "adapted", salt="one tenant", lora_request="it")) == 0
    assert made.matched(asking(TOKENS, "same", salt="one tenant")) == 256
    made.close()
    path = tmp_path / "tier"
    one = EngineWithTier(path, block=64, seed=1)
    assert one.finish(TOKENS[:300], table)
    one.close()
    stranger = EngineWithTier(path, block=64, seed=1, identity=b"other weights")
    assert stranger.matched(asking(TOKENS)) == 0
    stranger.close()


def test_half_a_surrogate_pair_is_a_salt_like_any_other() -> None:
    """A client can say it in JSON: nothing that it chooses may end the scheduler."""
    made, table = EngineWithTier("memory", block=64, seed=1), [3, 9, 1, 7, 5]
    assert made.finish(TOKENS[:300], table, salt="\ud83d")
    assert made.matched(asking(TOKENS, "other", salt="\ud83e")) == 0
    assert made.matched(asking(TOKENS, "same", salt="\ud83d")) == 256
    made.close()


def test_a_request_that_is_aborted_lets_go_of_what_was_found() -> None:
    made = EngineWithTier("memory", block=64, seed=1, memory="2MiB")
    assert made.finish(TOKENS[:300], [3, 9, 1, 7, 5])
    waiting, loading = asking(TOKENS, "waiting"), asking(TOKENS, "loading")
    assert made.matched(waiting) == made.matched(loading) == 256
    waiting.num_computed_tokens = 0
    assert made.scheduler.finished(waiting, ([],)) == (False, None)
    made.scheduler.allocated(loading, Blocks([8, 10, 11, 12, 13]), 256)
    loading.num_computed_tokens = 256  # as vLLM says before the tokens are there
    assert made.scheduler.finished(loading, ([8, 10, 11, 12],)) == (False, None), "not kept"
    orders = made.scheduler.take_orders()
    assert not orders.stores
    made.worker.carry_out(orders)
    ended = made.wait()
    assert ended.received == {"loading"}
    made.scheduler.received(ended.received)
    # Nothing is pinned: other requests find room.
    for seed in range(6):
        assert made.finish([seed, *TOKENS[:299]], [3, 9, 1, 7, 5])
    assert made.worker.take_counts().tier_failures == 0
    made.close()


def test_nothing_is_found_or_kept_across_other_weights(tmp_path: Path) -> None:
    made = EngineWithTier(tmp_path / "tier", block=64, seed=1)
    table = [3, 9, 1, 7, 5]
    assert made.finish(TOKENS[:300], table)
    begun = asking([7, *TOKENS[:299]], "begun")
    assert made.matched(begun) == 0
    assert made.matched(asking(TOKENS, "waiting")) == 256
    assert made.scheduler.reset_tier()
    assert made.scheduler.finished(begun, (table,)) == (False, None), "it began before"
    assert made.matched(asking(TOKENS, "after")) == 0
    assert made.finish(TOKENS[:300], table, name="again")
    assert made.matched(asking(TOKENS, "later")) == 256
    made.close()
    restarted = EngineWithTier(tmp_path / "tier", block=64, seed=1)
    assert restarted.matched(asking(TOKENS)) == 256, "what was kept under the checkpoint's weights"
    restarted.close()
    assert SchedulerSide(vllm_config(), made.config).reset_tier() is None


def test_a_request_for_another_engine_is_also_kept_and_let_go_once_both_are_done() -> None:
    made = EngineWithTier("memory", block=64, seed=1)
    both = SchedulerSide(vllm_config(), made.config, tier=made.tier)
    both.set_endpoints({(0, 0): "tcp://h:1"})
    request = asking(TOKENS[:300], params={"do_remote_decode": True})
    kept, params = both.finished(request, ([3, 9, 1, 7, 5],))
    orders = both.take_orders()
    assert kept
    assert params is not None
    assert [one.request_id for one in orders.offers] == ["r"]
    assert [one.request_id for one in orders.stores] == ["r"]
    made.ended.hold_twice({"r"})
    made.worker.carry_out(orders)
    made.worker._storing.shutdown(wait=True)
    assert not made.ended.take().sent, "the other engine has not read it yet"
    made.ended.sent("r")
    assert made.ended.take().sent == {"r"}
    made.close()


def test_a_tier_that_is_damaged_or_full_is_a_miss(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    made = EngineWithTier(path, block=64, seed=1, memory="1200KiB")
    assert made.finish(TOKENS[:300], [3, 9, 1, 7, 5])
    made.close()
    text = bytearray(path.read_bytes())
    for at in range(8192, len(text) - 4096, 4096):
        text[at] ^= 0xFF
    path.write_bytes(text)
    made = EngineWithTier(path, block=64, seed=1, memory="1200KiB")
    assert made.matched(asking(TOKENS[:310])) == 0
    for seed in range(9):
        made.finish([seed, *TOKENS[:299]], [3, 9, 1, 7, 5])
    assert made.matched(asking([8, *TOKENS[:299]], "last")) == 256
    assert made.matched(asking([0, *TOKENS[:299]], "first")) == 0
    stages = [describe_stage(vllm_config(), made.config)]
    about = (str(path), "1200KiB", described_model(stages), made.plan, "engine")
    made.close()
    path.write_bytes(b"x" * 4096)
    assert open_tier(*about) is None, "a damaged header"
    path.unlink()
    windows = EngineWithTier(path, block=64, seed=1, windows=True)
    windows.close()
    assert open_tier(*about) is None, "another model's"


def test_a_worker_whose_tier_cannot_be_used_lets_every_request_go(tmp_path: Path) -> None:
    made = EngineWithTier(tmp_path / "tier", block=64, seed=1)
    held = Memory(made.pool.ctypes.data, made.pool.nbytes, owner=made.pool)
    assert made.finish(TOKENS[:300], [3, 9, 1, 7, 5])
    request = asking(TOKENS, "found")
    assert made.matched(request) == 256
    made.worker.close()
    made.worker = TierWorker(None, made.plan, 0, held, made.ended)
    assert made.finish([7, *TOKENS[:299]], [3, 9, 1, 7, 5], name="kept")
    assert made.load(request, [6, 2, 8, 10], external=256).failed == {"found"}
    assert made.worker.take_counts().tier_failures == 2
    made.close()


def test_a_drafter_keeps_recurrent_states_and_guesses_out() -> None:
    made = EngineWithTier("memory", block=64, seed=1, guesses="eagle")
    assert made.finish(TOKENS[:300], [3, 9, 1, 7, 5]), "attention alone keeps what is settled"
    made.close()


def test_weights_are_told_apart_by_their_files_and_by_what_the_caller_says(tmp_path: Path) -> None:
    header = b'{"a":{"data_offsets":[0,40000000]},"b":{"data_offsets":[40000000,80000000]}}'
    weights = bytearray(len(header).to_bytes(8, "little") + header + bytes(80_000_000))
    path = tmp_path / "model.safetensors"
    path.write_bytes(weights)
    one = weights_identity(tmp_path)
    weights[8 + len(header) + 40_000_000] ^= 1  # the first byte of the second tensor
    path.write_bytes(weights)
    assert weights_identity(tmp_path) != one
    path.rename(tmp_path / "model.bin")
    assert weights_identity(tmp_path) != one
    config = vllm_config()
    config.model_config.model = str(tmp_path)
    config.model_config.hf_config = SimpleNamespace(to_dict=lambda: {"rope": 1, "labels": {1: 2}})
    own, named = cache_identity(config, None), cache_identity(config, "v7")
    assert own == cache_identity(config, None) != named
    config.model_config.dtype = "torch.float16"
    assert cache_identity(config, "v7") != named
    (tmp_path / "model.bin").unlink()
    with pytest.raises(AtlasError, match="weights_identity"):
        cache_identity(config, None)
