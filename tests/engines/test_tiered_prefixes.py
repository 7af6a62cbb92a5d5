"""Tokens of real models that begin with what other engines left in a tier, beside runs without."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvatlas.engines.transformers import AtlasCache, PrefixReuse, make_plan
from kvatlas.engines.transformers.identity_of_model import loaded_weights
from kvatlas.engines.transformers.tiered_prefixes import TieredPrefixes
from kvatlas.errors import AtlasError
from kvatlas.pool import BlockPool, PrefixIdentity
from kvatlas.routing import scattered
from kvatlas.tier import HostStore, PrefixFinder, StoreTier, Tier, open_tier
from tests.engines.guarded import Guarded
from tests.engines.test_prefix_reuse import NEW
from tests.engines.zoo import VOCABULARY, model_of, seeded
from tests.profiles import DEEP
from tests.tier import mooncake_world
from tests.tier.test_converting import OURS, opened, rows_of
from tests.tier.test_topologies import MODELS
from tests.tier.world import pools, small

QUICK = ["Llama", "Gemma3", "Qwen3Next"]
NAMES = [*QUICK, "DeepseekV3", "Llama4", "GptOss", "FalconH1", "NemotronH", "Lfm2", "KimiLinear"]
WHOLE = ("Llama", "DeepseekV3")
"""Models that see all tokens: whole blocks of these are found, and no others."""
BLOCK = 16
UNLIKE: tuple[dict[str, Any], ...] = (
    {"layout": "LBNHC", "max_len": 140},
    {"layout": "BLNHC", "max_len": 180, "block_size": 32},
)


@contextmanager
def engine(name: str, pages: Guarded, where: Any, number: int, **about: Any) -> Iterator[Any]:
    """One of two engines of unlike order, block size and longest request, on one tier."""
    options = UNLIKE[number] if name in QUICK[:2] else {**UNLIKE[number], "layout": "LBNHC"}
    try:
        plan = make_plan(model_of(name).config, batch=3, prefix_caching=True, **options)
    except AtlasError:  # states want blocks of their own size
        options = {key: value for key, value in options.items() if key != "block_size"}
        plan = make_plan(model_of(name).config, batch=3, prefix_caching=True, **options)
    options = {"block_size": BLOCK, **about}
    if "://" in str(where):
        options = {"staging": 1 << 20, "timeout": 30.0, **options}
    else:
        options = {"memory": "1MiB", **options}
    cache = pages.bind(plan, BlockPool(plan, null_block=False))
    made = PrefixReuse(model_of(name), cache, where, **options)
    try:
        yield made
    finally:
        made.close()
        assert all(ids.free == ids.count for ids in made.pool.ids.values())


def said_to(name: str, prompt: list[int], cache: AtlasCache | None = None) -> list[int]:
    """A prompt and what a model says to it, which may be the token that pads, and counts."""
    ids = torch.tensor([prompt])
    about: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "past_key_values": cache}
    made = model_of(name).generate(ids, max_new_tokens=NEW, do_sample=False, **about)
    tokens: list[int] = made[0].tolist()
    return tokens


def ask(
    name: str, reuse: PrefixReuse, prompt: list[int], attention: str = "kvatlas", **about: Any
) -> tuple[int, list[int]]:
    """How many tokens were found, and what is said then: the same as without a tier."""
    model_of(name).set_attn_implementation(attention)
    found = reuse.begin(prompt, **about)
    said = said_to(name, prompt, reuse.cache)
    reuse.end(said)
    model_of(name).set_attn_implementation("eager")
    assert said == said_to(name, prompt)
    return found, said


def prompts() -> list[list[int]]:
    return torch.randint(1, VOCABULARY, (3, 130), generator=seeded(33)).tolist()


def converse(name: str, pages: Guarded, where: Any) -> None:
    """What one engine has said, the other goes on from; and, if there is time, back."""
    first, more, last = prompts()
    with engine(name, pages, where, 0) as one:
        found, said = ask(name, one, first[:50])
        assert found == 0
    computed = len(said) - 1  # the last token was never given to the model
    with engine(name, pages, where, 1) as other:
        found, said = ask(name, other, said + more[:20])
        assert found == (computed // BLOCK * BLOCK if name in WHOLE else computed)
        assert other.tiered.counts["loaded"] == 1
    if not DEEP:
        return
    with engine(name, pages, where, 0) as one:
        assert ask(name, one, [*said[:3], *last[:40]])[0] == 0
        found, _ = ask(name, one, said + last[:9])
        computed = len(said) - 1
        assert found == (computed // BLOCK * BLOCK if name in WHOLE else computed)


@pytest.mark.parametrize("name", NAMES if DEEP else QUICK[:2])
def test_tokens_behind_what_another_engine_stored_are_those_without_it(
    name: str, pages: Guarded, tmp_path: Path
) -> None:
    kinds = (f"folder://{tmp_path}/store", tmp_path / "file")
    for where in kinds if DEEP else kinds[QUICK.index(name) :][:1]:
        converse(name, pages, where)


def test_tokens_of_a_chunk_before_which_did_not_come_are_not_read(
    pages: Guarded, tmp_path: Path
) -> None:
    first, more, _ = prompts()
    with engine("Llama4", pages, tmp_path / "file", 1) as one:
        said = ask("Llama4", one, first[:30])[1]
    with engine("Llama4", pages, tmp_path / "file", 1) as other:
        found, _ = ask("Llama4", other, said + more[:3], attention="eager")
        assert found == len(said) - 1


@pytest.mark.skipif(bool(mooncake_world.missing()), reason=mooncake_world.missing() or "it is here")
def test_tokens_agree_through_mooncake_store(pages: Guarded) -> None:
    with mooncake_world.running() as master:
        keeper = master.store()  # the memory of engines goes when they do
        for name in QUICK if DEEP else QUICK[2:]:
            converse(name, pages, f"mooncake://{master.address}")
        keeper.close()


def test_other_weights_and_other_salts_find_nothing_and_are_counted(
    pages: Guarded, tmp_path: Path
) -> None:
    where, prompt = f"folder://{tmp_path}", prompts()[0][:40]
    mine, model = PrefixIdentity(salt=b"mine"), model_of("Llama")
    with engine("Llama", pages, where, 0) as one:
        ask("Llama", one, prompt, identity=mine)
    with engine("Llama", pages, where, 1) as other:
        assert ask("Llama", other, prompt)[0] == 0
        assert other.tiered.tier.misses == {"absent": 2}, "not found, and so stored"
    with engine("Llama", pages, where, 1) as other:
        assert ask("Llama", other, prompt, identity=mine)[0] == 32
    weight = model.lm_head.weight
    with torch.no_grad():
        weight += 0.5
    try:
        with engine("Llama", pages, where, 1) as fine_tuned:
            assert fine_tuned.begin(prompt) == 0
            assert fine_tuned.tiered.tier.misses == {"other_weights": 1}
    finally:
        with torch.no_grad():
            weight -= 0.5


def test_what_is_lost_between_lookup_and_load_is_computed(pages: Guarded, tmp_path: Path) -> None:
    prompt = prompts()[0][:60]
    for harm in ("removed", "flipped"):
        folder = tmp_path / harm
        with engine("Llama", pages, f"folder://{folder}", 0) as one:
            ask("Llama", one, prompt)
        with engine("Llama", pages, f"folder://{folder}", 1) as other:
            search = other.tiered.search

            def then_harmed(chain: Any, search: Any = search, folder: Path = folder) -> Any:
                found = search(chain)
                for path in folder.rglob("0.0-16/0"):  # an object of every row
                    path.chmod(0o600)
                    path.write_bytes(bytes(path.stat().st_size))
                    if folder.name == "removed":
                        path.unlink()
                return found

            other.tiered.search = then_harmed
            assert ask("Llama", other, prompt)[0] == 0
            assert other.tiered.counts["lost"] == 1
            reason = "incomplete" if harm == "removed" else "damaged"
            assert other.tiered.tier.misses[reason]


def test_a_tier_that_is_open_may_be_given_and_stays_open(pages: Guarded) -> None:
    plan = make_plan(model_of("Llama").config, batch=3, prefix_caching=True, **UNLIKE[0])
    with open_tier("memory", plan, memory="1MiB", block_size=BLOCK) as tier:
        for expected in (0, 32):
            reuse = PrefixReuse(model_of("Llama"), pages.bind(plan), tier)
            assert ask("Llama", reuse, prompts()[0][:40])[0] == expected
            reuse.close()
        assert isinstance(tier, Tier)
        assert len(tier) == (40 + NEW - 1) // BLOCK
    reuse = PrefixReuse(model_of("Llama"), pages.bind(plan), tier)  # closed: all is computed
    assert ask("Llama", reuse, prompts()[0][:40])[0] == 0
    assert reuse.tiered is not None
    assert reuse.tiered.counts == {"failed": 1, "not_stored": 1}
    pictured = PrefixIdentity(media=((3, b"a picture"),))
    ask("Llama", reuse, prompts()[0][:20], identity=pictured)
    assert reuse.tiered.counts["not_stored"] == 1, "tokens alone do not say what it is"


@pytest.mark.skipif(not DEEP, reason="processes that import torch: in the deep profile")
def test_four_processes_at_once_share_a_tier_and_every_token_is_right(tmp_path: Path) -> None:
    with ExitStack() as running:
        addresses = {"Llama": f"folder://{tmp_path}/store", "Gemma3": str(tmp_path / "file")}
        if not mooncake_world.missing():
            master = running.enter_context(mooncake_world.running())
            running.callback(master.store(64 << 20).close)
            addresses["Qwen3Next"] = f"mooncake://{master.address}"
        for name, where in addresses.items():
            at_once = [
                subprocess.Popen(
                    [sys.executable, "-m", "tests.engines.tiered_process", name, where, str(n)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for n in range(4)
            ]
            counted: Counter[str] = Counter()
            for one in at_once:
                said, problems = one.communicate(timeout=300)
                assert one.returncode == 0, problems[-2000:]
                for line in said.splitlines():
                    if line.startswith("counts "):
                        counted += Counter(json.loads(line.removeprefix("counts ")))
            assert counted["loaded"] > 4, (name, where, counted)
            assert not counted["failed"] + counted["not_stored"], (name, where, counted)


def test_weights_that_differ_in_any_element_are_others() -> None:
    for kind in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        layer = torch.nn.Linear(128, 128, dtype=torch.float32).to(kind).requires_grad_(False)
        packed = torch.zeros(128 * 128 + 3, dtype=kind)
        layer.weight.data = packed[3:].view(128, 128)  # as others lay several into one
        told = {loaded_weights(layer)}
        for place in (0, 1, 77, 128 * 128 - 1):
            packed.view(torch.uint8)[-1 - place] = 1
            told.add(loaded_weights(layer))
        assert len(told) == 5


def test_whole_blocks_of_a_request_that_is_longer_than_the_tiers_are_stored(
    pages: Guarded, tmp_path: Path
) -> None:
    prompt = prompts()[0][:60]
    with engine("Llama", pages, tmp_path / "file", 0, max_len=40) as one:
        ask("Llama", one, prompt)
        assert one.tiered.counts["stored"] == 1
    with engine("Llama", pages, tmp_path / "file", 1) as other:
        assert ask("Llama", other, prompt)[0] == 32


def test_what_was_converted_as_it_was_loaded_is_stored_in_the_engines_own_dtype() -> None:
    model, store = MODELS["dense"], HostStore()
    bf16, fp8 = small(model), small(model, kv_dtype="fp8")
    with (
        StoreTier(store, rows_of(model), OURS, staging=1 << 20) as theirs,
        opened(store, model, other=True) as tier,
    ):
        chain = PrefixFinder(tier).chain(range(96))
        about: dict[str, Any] = {"blocks": scattered(bf16, 32), "tokens": 32}
        theirs.store(pools(bf16, 0, 1), bf16, **about, keys=chain.keys(32))
        prefixes, blocks = TieredPrefixes(tier, OURS), scattered(fp8, 96)
        cache: Any = SimpleNamespace(pools=pools(fp8, 0, 2), plan=fp8)
        assert prefixes.search(chain).tokens == 32
        assert prefixes.load(chain, cache, blocks, 0, 32)
        prefixes.store(chain, cache, blocks, 96)
        prefixes.close()
        # Without its beginning, what comes behind it would be found by nobody.
        assert tier.match(chain.keys(96), 96) == 96


@pytest.mark.parametrize(
    ("name", "kind", "found"),
    [
        ("Gemma3", "folder", [0, 128, 192, 240]),
        ("GptOss", "file", [0, 128, 192, 240]),
        ("FalconH1", "folder", [0, 0, 192, 240]),
        ("Qwen3Next", "file", [0, 0, 192, 240]),
    ],
)
def test_a_shared_system_prompt_is_found_by_the_second_or_third_request(
    name: str, kind: str, found: list[int], pages: Guarded, tmp_path: Path
) -> None:
    """Each request runs in another engine, so that all is read from the tier."""
    where = f"folder://{tmp_path}/store" if kind == "folder" else tmp_path / "file"
    system, *own = torch.randint(1, VOCABULARY, (4, 200), generator=seeded(34)).tolist()
    first, second, third = (system + tail[:50] for tail in own)
    model = model_of(name)
    plan = make_plan(model.config, batch=2, prefix_caching=True, max_len=300, layout="LBNHC")
    options: dict[str, Any] = {"block_size": BLOCK}
    options |= {"staging": 1 << 20, "timeout": 30.0} if kind == "folder" else {"memory": "4MiB"}
    got = []
    for prompt in (first, second, third, first):
        cache = pages.bind(plan, BlockPool(plan, null_block=False))
        reuse = PrefixReuse(model, cache, where, **options)
        got.append(ask(name, reuse, prompt)[0])
        reuse.close()
    assert got == found
