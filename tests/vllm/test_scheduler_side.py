"""What the scheduler's side of the connector decides, without vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvatlas import AtlasError
from kvatlas.engines.vllm.orders import RemoteRequest, prompt_digest
from kvatlas.engines.vllm.prefix_tier import PrefixTier
from kvatlas.engines.vllm.request_context import request_context
from kvatlas.engines.vllm.scheduler_side import SchedulerSide
from kvatlas.engines.vllm.supported_versions import check_managers
from kvatlas.engines.vllm.transfer_groups import TransferGroup
from kvatlas.errors import Code
from kvatlas.planning import Policy, plan
from kvatlas.tier import Tier
from tests.planning.models import SMALL
from tests.vllm.shapes import (
    Blocks,
    Config,
    FullAttentionSpec,
    Group,
    MambaSpec,
    Managers,
    Request,
    SlidingWindowSpec,
    vllm_config,
)

FULL = Group(FullAttentionSpec(block_size=64))
SLIDING = Group(SlidingWindowSpec(block_size=64, sliding_window=64))
STATES = Group(MambaSpec())


def side(*groups: Group, caching: bool = False) -> SchedulerSide:
    made = SchedulerSide(vllm_config(caching=caching), Config(list(groups)))
    made.set_endpoints({(0, 1): "tcp://h:2", (0, 0): "tcp://h:1"})
    return made


def told(tokens: int = 100, **changed: Any) -> dict[str, Any]:
    """What a prefill engine answers."""
    about: dict[str, Any] = {"version": 1, "request": "p/1", "tokens": tokens}
    about["prompt"] = prompt_digest(range(tokens), tokens)
    return RemoteRequest(**about | {"endpoints": ("tcp://h:1",)} | changed).params("other")


def test_the_last_token_of_a_prompt_is_always_computed_here() -> None:
    decode = side(FULL)
    request = Request("d", 100, told(100))
    decode.on_new_request(request)
    assert decode.matched_tokens(request, 0) == (100, True), "vLLM computes the last again"
    assert decode.matched_tokens(request, 64) == (36, True)
    assert decode.matched_tokens(request, 99) == (0, False), "nothing but the last is missing"
    decode.allocated(request, Blocks([7, 8]), 36)
    (order,) = decode.take_orders().pulls
    assert (order.start, order.stop, order.tables) == (64, 99, ((7, 8),)), "and it is not read"
    assert order.remote.request == "p/1"
    assert decode.matched_tokens(request, 0) == (0, False), "a request is read once"
    assert decode.take_orders().pulls == []


def test_the_last_token_of_a_prompt_is_read_where_it_is_the_last_of_its_block() -> None:
    """vLLM caches full blocks that were read before the last token is computed again."""
    for tokens, stop, entries in ((128, 128, 2), (129, 128, 2), (130, 129, 3), (2, 1, 1)):
        decode = side(FULL)
        request = Request("d", tokens, told(tokens))
        decode.on_new_request(request)
        decode.allocated(request, Blocks([7, 8, 9]), tokens)
        (order,) = decode.take_orders().pulls
        assert (order.start, order.stop, len(order.tables[0])) == (0, stop, entries)


def test_a_prefix_that_is_here_is_not_read_and_the_other_engine_is_told() -> None:
    decode = side(FULL)
    request = Request("d", 100, told(100))
    decode.on_new_request(request)
    decode.allocated(request, Blocks([7, 8]), 0)
    orders = decode.take_orders()
    assert [one.request for one in orders.let_go] == ["p/1"]
    assert not orders.pulls
    assert decode.finished(request, ([7, 8],)) == (False, None)
    assert decode.take_orders().let_go == [], "once"


def test_prompts_are_one_token_shorter_where_windows_or_states_need_it() -> None:
    for groups, left in (((FULL,), 100), ((FULL, SLIDING), 99), ((FULL, STATES), 99)):
        prefill = side(*groups)
        request = Request("p", 100, {"do_remote_decode": True})
        for _ in range(2):  # a request that comes again after it was preempted
            prefill.on_new_request(request)
            assert request.prompt_token_ids is not None
            lengths = (len(request.prompt_token_ids), len(request._all_token_ids))
            assert (*lengths, request.num_prompt_tokens) == (left,) * 3
        single = Request("single", 1, {"do_remote_decode": True})
        prefill.on_new_request(single)
        assert single.num_prompt_tokens == 1
        plain = Request("plain", 100)
        prefill.on_new_request(plain)
        assert plain.num_prompt_tokens == 100


def test_drafters_that_look_ahead_leave_more_tokens_to_the_decode_engine() -> None:
    config = vllm_config()
    config.num_prefill_lookahead_tokens = 4
    both = SchedulerSide(config, Config([FULL]))
    request = Request("p", 100, {"do_remote_decode": True})
    both.on_new_request(request)
    assert request.num_prompt_tokens == 97
    other = Request("d", 100, told(97))
    both.on_new_request(other)
    assert both.matched_tokens(other, 0) == (97, True)


def test_what_a_prefill_engine_answers_is_what_a_decode_engine_reads() -> None:
    prefill, decode = side(FULL, SLIDING), side(FULL, SLIDING)
    request = Request("p", 150, {"do_remote_decode": True})
    request.num_computed_tokens = 149
    keep, params = prefill.finished(request, ([4, 5, 6], [0, 8, 9]))
    assert keep
    assert params is not None
    (offer,) = prefill.take_orders().offers
    assert (offer.tables, offer.tokens) == (((4, 5, 6), (-1, 8, 9)), 149)
    again = Request("d", 150, params)
    decode.on_new_request(again)
    assert decode.matched_tokens(again, 0) == (149, True)
    decode.allocated(again, Blocks([1, 2, 3, 4], [0, 5, 6]), 149)
    (order,) = decode.take_orders().pulls
    assert order.remote.request == offer.name != "p"
    assert order.remote.endpoints == ("tcp://h:1", "tcp://h:2"), "in the order of ranks"
    assert order.tables == ((1, 2, 3), (-1, 5, 6))


def test_names_of_offers_are_never_used_twice() -> None:
    names = set()
    for _ in range(2):
        prefill = side(FULL)
        request = Request("p" * 400, 10, {"do_remote_decode": True})
        prefill.finished(request, ([4],))
        names.add(prefill.take_orders().offers[0].name)
    assert len(names) == 2
    assert max(map(len, names)) <= 256


def test_a_recurrent_state_is_one_block_or_the_one_of_the_last_token() -> None:
    for mode, block, ids, table in (
        ("none", 1024, [9, 10], (9,)),
        ("align", 64, [0, 0, 7, 8], (-1, -1, 7)),
    ):
        prefill = side(FULL, Group(MambaSpec(block_size=block, mamba_cache_mode=mode)))
        request = Request("p", 150, {"do_remote_decode": True})
        prefill.finished(request, ([4, 5, 6], ids))
        assert prefill.take_orders().offers[0].tables[1] == table


def test_requests_that_end_early_leave_nothing_behind() -> None:
    prefill = side(FULL)
    aborted = Request("p", 100, {"do_remote_decode": True}, "FINISHED_ABORTED")
    assert prefill.finished(aborted, ([4, 5],)) == (False, None)
    assert prefill.take_orders().offers == []
    decode = side(FULL)
    never_scheduled = Request("a", 100, told())
    decode.on_new_request(never_scheduled)
    assert decode.finished(never_scheduled, ([],)) == (False, None)
    assert len(decode.take_orders().let_go) == 1
    under_way = Request("b", 100, told())
    decode.on_new_request(under_way)
    decode.allocated(under_way, Blocks([1, 2]), 99)
    assert decode.finished(under_way, ([1, 2],)) == (False, None)
    assert decode.take_orders().cancelled == ["b"]
    here = Request("c", 100, told())
    decode.on_new_request(here)
    decode.allocated(here, Blocks([1, 2]), 99)
    decode.received({"c"})
    decode.finished(here, ([1, 2],))
    assert decode.take_orders().cancelled == []


def test_parameters_from_outside_are_checked() -> None:
    good = told()["kvatlas"]
    bad: list[Any] = [
        None,
        [],
        {**good, "version": 2},
        {**good, "tokens": -1},
        {**good, "request": ""},
        {**good, "endpoints": []},
        {**good, "endpoints": ["http://h:1"]},
        {**good, "endpoints": ["tcp://h h:1"]},
        {**good, "more": 1},
    ]
    for said in bad:
        decode = side(FULL)
        request = Request("d", 100, {"do_remote_prefill": True, "kvatlas": said})
        decode.on_new_request(request)
        assert decode.matched_tokens(request, 0) == (0, False), said
        decode.allocated(request, Blocks([1, 2]), 0)
        orders = decode.take_orders()
        assert not orders.pulls
        assert not orders.let_go


def test_another_prompts_tokens_are_not_read_and_given_back() -> None:
    decode = side(FULL)
    request = Request("d", 100, told(100))
    assert request.prompt_token_ids is not None
    request.prompt_token_ids[50] += 1
    decode.on_new_request(request)
    assert decode.matched_tokens(request, 0) == (0, False)
    orders = decode.take_orders()
    assert [one.request for one in orders.release_soon] == ["p/1"], "its real reader may come"
    decode.finished(request, ([],))
    orders = decode.take_orders()
    assert orders.let_go == orders.release_soon == [], "once"


def test_siblings_keep_an_offer_until_the_last_of_them_has_read_it() -> None:
    decode = side(FULL)
    params = told(100)
    children = [Request(f"{index}_d", 100, params) for index in range(4)]
    for child in children[:2]:
        decode.on_new_request(child)
    for child in children[:2]:
        assert decode.matched_tokens(child, 0) == (100, True), "the dictionary may be shared"
        decode.allocated(child, Blocks([7, 8]), 100)
    orders = decode.take_orders()
    assert [order.final for order in orders.pulls] == [False, False]
    decode.received({"0_d"})
    assert decode.take_orders().release_soon == [], "another is being read"
    decode.received({"1_d"})
    decode.on_new_request(children[2])  # late, in the same step
    orders = decode.take_orders()
    assert (orders.release_soon, orders.keep) == ([], ["p/1"])
    decode.finished(children[2], ([],))  # aborted in the queue
    orders = decode.take_orders()
    assert [one.request for one in orders.release_soon] == ["p/1"]
    decode.on_new_request(children[3])  # later still
    assert decode.take_orders().keep == ["p/1"]
    decode.allocated(children[3], Blocks([7, 8]), 100)
    assert [order.final for order in decode.take_orders().pulls] == [False]
    decode.finished(children[3], ([7, 8],))  # aborted while it is read
    orders = decode.take_orders()
    assert orders.cancelled == ["3_d"]
    assert [one.request for one in orders.release_soon] == ["p/1"]
    assert orders.let_go == []
    decode.received({"3_d"})
    assert decode.take_orders().release_soon == [], "once"


def test_siblings_at_several_data_parallel_ranks_leave_the_offer_to_expire() -> None:
    """No rank knows the others' siblings, and a release by one would end the offer for all."""
    for external, released in ((False, 0), (True, 1)):
        config = vllm_config()
        config.parallel_config.data_parallel_size = 2
        config.parallel_config.data_parallel_external_lb = external
        decode = SchedulerSide(config, Config([FULL]))
        child = Request("0_d", 100, told(100))
        decode.on_new_request(child)
        decode.allocated(child, Blocks([7, 8]), 100)
        decode.received({"0_d"})
        assert len(decode.take_orders().release_soon) == released


def test_a_request_without_siblings_ends_the_offer_by_its_read() -> None:
    decode = side(FULL)
    request = Request("d", 100, told(100))
    decode.on_new_request(request)
    decode.allocated(request, Blocks([7, 8]), 100)
    (order,) = decode.take_orders().pulls
    assert order.final
    decode.received({"d"})
    orders = decode.take_orders()
    assert orders.let_go == orders.release_soon == []


def test_two_requests_with_the_same_parameters_are_both_read() -> None:
    decode = side(FULL)
    both = [Request(name, 100, told(100)) for name in ("a", "b")]
    for request in both:
        decode.on_new_request(request)
    for request in both:
        decode.allocated(request, Blocks([7, 8]), 100)
    assert [order.final for order in decode.take_orders().pulls] == [False, False]
    decode.received({"a", "b"})
    assert [one.request for one in decode.take_orders().let_go] == ["p/1"]


def test_another_prompt_does_not_release_an_offer_that_has_a_reader() -> None:
    """A completion request with several prompts passes the same parameters with each."""
    decode, other = side(FULL), Request("other", 90, told(100))
    decode.on_new_request(Request("d", 100, told(100)))
    decode.on_new_request(other)
    orders = decode.take_orders()
    assert orders.let_go == orders.release_soon == []


def test_siblings_that_are_prefilled_share_one_offer() -> None:
    prefill = side(FULL)
    answers = []
    for index in range(3):
        child = Request(f"{index}_p", 100, {"do_remote_decode": True})
        prefill.on_new_request(child)
        answers.append(prefill.finished(child, ([4 + index, 9 + index],)))
    assert [held for held, _ in answers] == [True, False, False]
    names = {RemoteRequest.read(params or {}).request for _, params in answers}
    assert len(names) == 1
    assert len(prefill.take_orders().offers) == 1
    prefill.sent({"0_p"})
    late = Request("3_p", 100, {"do_remote_decode": True})
    held, params = prefill.finished(late, ([4, 9],))
    assert held, "the shared offer has ended"
    assert RemoteRequest.read(params or {}).request not in names
    plain = [Request("q", 100, {"do_remote_decode": True}) for _ in range(2)]
    assert [prefill.finished(one, ([4, 9],))[0] for one in plain] == [True, True]


def test_an_old_offer_is_not_shared() -> None:
    prefill = SchedulerSide(vllm_config(), Config([FULL]), lease_seconds=1e-6)
    prefill.set_endpoints({(0, 0): "tcp://h:1"})
    children = [Request(f"{index}_p", 100, {"do_remote_decode": True}) for index in range(2)]
    assert [prefill.finished(child, ([4, 9],))[0] for child in children] == [True, True]


def test_siblings_that_are_shortened_do_not_shorten_each_other() -> None:
    prefill, params, tokens = side(FULL, SLIDING), {"do_remote_decode": True}, list(range(100))
    for index in range(2):
        child = Request(f"{index}_p", 100, params)
        child.prompt_token_ids = tokens
        prefill.on_new_request(child)
        assert child.num_prompt_tokens == len(child.prompt_token_ids) == 99
    assert (len(tokens), params) == (100, {"do_remote_decode": True})


def adapter(name: str, path: str = "", number: int = 1) -> Any:
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=path)


def image(name: str, offset: int = 5) -> Any:
    return SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=3))


def test_requests_with_equal_tokens_read_each_other_only_with_equal_contexts() -> None:
    contexts: list[dict[str, Any]] = [
        {},
        {"cache_salt": "mine"},
        {"cache_salt": "\ud800"},
        {"lora_request": adapter("a")},
        {"lora_request": adapter("b")},
        {"mm_features": [image("cat")]},
        {"mm_features": [image("dog")]},
        {"mm_features": [image("dog", offset=6)]},
        {"prompt_embeds": torch.zeros(100, 4)},
        {"prompt_embeds": torch.ones(100, 4)},
    ]
    for ours in contexts:
        prefill = side(FULL)
        request = Request("p", 100, {"do_remote_decode": True})
        vars(request).update(ours)
        _, params = prefill.finished(request, ([4, 5],))
        for theirs in contexts:
            decode = side(FULL)
            again = Request("d", 100, dict(params or {}))
            vars(again).update(theirs)
            decode.on_new_request(again)
            read = decode.matched_tokens(again, 0)[0] == 100
            assert read == (ours is theirs), (ours, theirs)


def test_media_behind_the_offered_tokens_do_not_count() -> None:
    request = Request("p", 100)
    assert request_context(request, 100) == b"", "a plain request"
    vars(request)["mm_features"] = [image("cat", offset=50)]
    assert request_context(request, 50) == b""
    assert request_context(request, 51) != b""


def test_adapters_count_by_their_content(tmp_path: Path) -> None:
    def made(name: str, weights: bytes, alpha: int) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(weights)
        about = {"lora_alpha": alpha, "base_model_name_or_path": f"/models/{name}"}
        (folder / "adapter_config.json").write_text(json.dumps(about))
        return str(folder)

    def context(name: str, path: str) -> bytes:
        request = Request("p", 10)
        vars(request)["lora_request"] = adapter(name, path)
        return request_context(request, 10)

    one = context("one", made("one", b"weights", 8))
    assert context("two", made("two", b"weights", 8)) == one, "names and paths do not count"
    assert context("three", made("three", b"WEIGHTS", 8)) != one
    assert context("four", made("four", b"weights", 16)) != one
    assert context("one", "/gone") == context("one", "") != one
    (tmp_path / "one" / "adapter_model.safetensors").write_bytes(b"replaced")
    assert context("one", str(tmp_path / "one")) == one, "vLLM has loaded the first"


def test_blocks_that_a_window_fills_in_part_are_not_cached() -> None:
    """A later request may share a shorter prefix, and its window reach into what is not here."""
    for caching in (True, False):
        decode, managers = side(FULL, SLIDING, caching=caching), Managers(2)
        decode.bind_manager(managers)
        for name, tokens, start, cached in (
            ("in the middle", 151, 0, {"in the middle": 2}),  # from token 87 on
            ("at an edge", 192, 0, {"at an edge": 2}),  # from token 128 on: two are null
            ("found here", 151, 128, {}),
        ):
            request = Request(name, tokens, told(tokens))
            decode.on_new_request(request)
            decode.allocated(request, Blocks([1, 2, 3], [0, 4, 5]), tokens - 1 - start)
            assert managers.cached(1) == (cached if caching else {}), name
            assert managers.cached(0) == {}
            managers.cached(1).clear()


WHOLE = Group(FullAttentionSpec(block_size=64, sliding_window=64))
"""What vLLM says of all layers without the hybrid manager, where some of them see a window."""


def test_blocks_before_a_window_are_not_cached_where_the_other_engine_keeps_windows_alone() -> None:
    """An engine without the hybrid manager would cache them as if all their tokens were there."""
    for caching, windows, start, cached in (
        (True, (64,), 0, {"d": 3}),  # from token 136 on
        (True, (64,), 128, {"d": 3}),
        (True, (64,), 192, {}),
        (True, (), 0, {}),
        (False, (64,), 0, {}),
    ):
        decode, managers = side(WHOLE, caching=caching), Managers(1)
        decode.bind_manager(managers)
        request = Request("d", 200, told(199, windows=windows))
        decode.on_new_request(request)
        assert decode.matched_tokens(request, start) == (199 - start, True)
        decode.allocated(request, Blocks([1, 2, 3, 4]), 199 - start)
        assert managers.cached(0) == cached, (caching, windows, start)
        # Whoever reads it from here is told the same.
        decode.received({"d"})
        request.kv_transfer_params = {"do_remote_decode": True}
        _, params = decode.finished(request, ([1, 2, 3, 4],))
        assert params is not None
        assert RemoteRequest.read(params).windows == windows


def test_a_tier_that_keeps_all_tokens_is_given_no_windows_alone() -> None:
    """Blocks before a window have whatever was there, and a shorter prompt would find them."""
    cases: tuple[tuple[Policy, tuple[int, ...], bool], ...] = (
        ("uniform", (40,), False),
        ("uniform", (), True),
        ("atlas", (40,), True),  # no more than the window
    )
    for policy, windows, stored in cases:
        rows = plan(SMALL["sliding"], memory="16MiB", policy=policy, layout="BLHNC", max_len=512)
        decode = side(Group(FullAttentionSpec(block_size=16, sliding_window=40)), caching=True)
        decode.bind_manager(Managers(1))
        found: Any = Tier(rows)
        decode.use_tier(PrefixTier(found, 512, b"weights"))
        request = Request("d", 200, told(199, windows=windows))
        decode.on_new_request(request)
        decode.allocated(request, Blocks([*range(1, 14)]), 199)
        decode.received({"d"})
        assert decode.finished(request, ([*range(1, 14)],)) == (stored, None), (policy, windows)
        assert len(decode.take_orders().stores) == stored
        decode.close()


def test_windows_of_unlike_layers_that_keep_all_tokens_are_all_known() -> None:
    specs = [FullAttentionSpec(block_size=64, sliding_window=seen) for seen in (None, 128, 64)]
    several = SimpleNamespace(kv_cache_specs=dict(enumerate(specs)))
    group = TransferGroup(several, 0)
    assert set(group.windows_kept_whole) == {64, 128}
    assert group.incomplete_blocks(0, 199, windows_alone=True) == 3, "the shortest window's"
    assert group.incomplete_blocks(0, 199) == 0


def test_a_cache_manager_that_cannot_be_asked_is_refused() -> None:
    check_managers(Managers(1))
    for manager in (object(), Managers(0)):
        with pytest.raises(AtlasError) as refusal:
            check_managers(manager)
        assert refusal.value.code is Code.ENGINE_REFUSES
