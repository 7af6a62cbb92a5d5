"""Host pools of SGLang and their stored pages, made, written and read by SGLang's own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvatlas import AtlasError, Code
from kvatlas.engines.object_files import read_pages, write_pages
from kvatlas.engines.sglang import (
    PageFiles,
    PageNamespace,
    describe_host_pool,
    page_buffer,
    page_hashes,
    rank_suffix,
)
from kvatlas.planning import Plan, plan
from kvatlas.tier import Tier
from tests.other_engines.engine_pools import Bytes, move
from tests.other_engines.imports import sglang
from tests.other_engines.test_sglang_pools import DENSE, LATENT, bits, heads, latent, stored
from tests.planning.test_engine_memory import tables_of

mha = sglang("mem_cache.pool_host.mha")
mla = sglang("mem_cache.pool_host.mla")
storage = sglang("mem_cache.hicache_storage")
scheme = sglang("mem_cache.hicache_key_scheme")

PAGE, TOKENS = 16, 40
HEAD_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head", "page_unified")
ROW_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_unified")
Array = NDArray[Any]


def host(layout: str, *, rows: bool = False, groups: int = 1) -> Any:
    """A host pool of nine pages with random content."""
    device = latent() if rows else heads()()
    more: dict[str, Any] = {"target_layer_num": 3} if rows else {"head_group_num": groups}
    kind = mla.MLATokenToKVPoolHost if rows else mha.MHATokenToKVPoolHost
    info = device._mla_buffer_info() if rows else device._mha_buffer_info()
    pool = kind(
        info, 1.0, 0, PAGE, layout, pin_memory=False, device_capacity_tokens=128,
        start_layer=0, end_layer=2, **more,
    )  # fmt: skip
    random = torch.Generator().manual_seed(len(layout))
    pool.kv_buffer[:] = torch.randn(pool.kv_buffer.shape, generator=random).to(torch.bfloat16)
    return pool


def at(pool: Any, layer: int, slots: list[int]) -> dict[str, Array]:
    """K and V, or latent and rope, of slots: the indices are those of SGLang's dims."""
    kv, page, within = pool.kv_buffer, torch.tensor(slots) // PAGE, torch.tensor(slots) % PAGE
    loc, sides = torch.tensor(slots), {}
    if isinstance(pool, mla.MLATokenToKVPoolHost):
        rows = {
            "layer_first": lambda: kv[layer, loc, 0],
            "page_first": lambda: kv[loc, layer, 0],
            "page_first_direct": lambda: kv[page, layer, within, 0],
            "page_unified": lambda: kv[page, layer, within],
        }[pool.layout]()
        return {"latent": bits(rows[:, :64]), "rope": bits(rows[:, 64:])}
    for side, name in enumerate("kv"):
        found = {
            "layer_first": lambda side: kv[side, layer, loc],
            "page_first": lambda side: kv[side, loc, layer],
            "page_first_direct": lambda side: kv[side, page, layer, within],
            "page_head": lambda side: kv[side, page, :, within, layer],
            "page_unified": lambda side: kv[page, :, layer, side, within].flatten(1, 2),
        }[pool.layout](side)
        sides[name] = bits(found)
    return sides


def assert_equal(made: Plan, own: list[Bytes], table: Any, pool: Any, blocks: list[int]) -> None:
    slots = [blocks[t // PAGE] * PAGE + t % PAGE for t in range(TOKENS)]
    for n, layer in enumerate(made.layers):
        found = stored(made, own, layer, table, TOKENS)
        wanted = at(pool, n, slots)
        assert found.keys() == wanted.keys()
        for field, values in wanted.items():
            assert np.array_equal(found[field].ravel(), values.ravel()), (layer, field)


CASES = [
    *((layout, False, 1) for layout in HEAD_LAYOUTS),
    ("page_unified", False, 2),
    *((layout, True, 1) for layout in ROW_LAYOUTS),
]


@pytest.mark.parametrize("policy", ["vllm", "atlas"])
@pytest.mark.parametrize(("layout", "rows", "groups"), CASES)
def test_host_pools_move_there_and_back(layout: str, rows: bool, groups: int, policy: Any) -> None:
    model = LATENT if rows else DENSE
    pool = host(layout, rows=rows, groups=groups)
    parts = [describe_host_pool(model, pool, head_group=n, max_len=64) for n in range(groups)]
    made = parts[0].plan
    assert all(part.plan == made for part in parts)
    assert made.tp == groups
    ours = plan(model, memory="1MiB", policy=policy, max_len=64)
    own = [np.zeros(one.nbytes, np.uint8) for one in ours.pools]
    tables = tables_of(made, TOKENS, first=1), tables_of(ours, TOKENS, first=2)
    for rank, part in enumerate(parts):
        move(part, (ours, own), tables, TOKENS, rank)
    assert_equal(ours, own, tables[1], pool, tables[0][0])
    if groups == 1:
        before = pool.kv_buffer.clone()
        back = tables_of(made, TOKENS, first=2)
        pool.kv_buffer.zero_()
        move((ours, own), parts[0], (tables[1], back), TOKENS)
        assert_equal(ours, own, tables[1], pool, back[0])
        written = int((bits(pool.kv_buffer) != 0).sum())
        assert written <= TOKENS * bits(before).size // pool.size


# -- stored pages ---------------------------------------------------------------------------------


def file_backend(folder: Path, rows: bool) -> Any:
    config = storage.HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=rows, enable_storage_metrics=False, is_page_first_layout=True,
        model_name="org/model",
    )  # fmt: skip
    return storage.HiCacheFile(config, str(folder))


@pytest.mark.parametrize(
    ("layout", "rows"), [(one, False) for one in HEAD_LAYOUTS[:4]]
    + [(one, True) for one in ROW_LAYOUTS[:3]],
)  # fmt: skip
def test_pages_that_sglang_stored_are_read_and_ours_by_sglang(
    layout: str, rows: bool, tmp_path: Path
) -> None:
    model, pool = LATENT if rows else DENSE, host(layout, rows=rows)
    theirs = file_backend(tmp_path, rows)
    hashes = page_hashes(list(range(100, 100 + TOKENS)), PAGE)
    names = [one + rank_suffix("org/model", mla=rows) for one in hashes]
    for n, one in enumerate(hashes):
        assert theirs._write_page("kv", one, pool, (n + 3) * PAGE)
    store, held = PageFiles(tmp_path), page_buffer(model, layout, pages=3, page=PAGE, max_len=64)
    assert sorted(store.names()) == sorted(names)
    assert read_pages(store, [*names, "absent"], held) == len(names) == 2
    # A tier keeps canonical rows, from which any plan can be served.
    ours = plan(model, memory="1MiB", max_len=64)
    own = [np.zeros(one.nbytes, np.uint8) for one in ours.pools]
    with Tier(plan(model, memory="1MiB", layout="BLHNC", max_len=64)) as tier:
        keys = [bytes.fromhex(one) for one in hashes]
        tier.store(
            {0: held.pages.reshape(-1)}, held.memory.plan, blocks=[0, 1], tokens=32, keys=keys
        )
        tier.fetch({0: own[0]}, ours, blocks=[5, 2], tokens=32, keys=keys)
    for n, layer in enumerate(ours.layers):
        found = stored(ours, own, layer, {0: [5, 2]}, 32)
        for field, values in at(pool, n, list(range(3 * PAGE, 5 * PAGE))).items():
            assert np.array_equal(found[field].ravel(), values.ravel())
    # The other way: a request of ours, stored for SGLang.
    other = page_buffer(model, layout, pages=2, page=PAGE, max_len=64)
    move((ours, own), other.memory, ({0: [5, 2]}, {0: [0, 1]}), 32)
    (tmp_path / "ours").mkdir()
    assert write_pages(PageFiles(tmp_path / "ours"), names, other) == 2
    for path in (tmp_path / "ours").iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()
    pool.kv_buffer.zero_()
    reader = file_backend(tmp_path / "ours", rows)
    for n, one in enumerate(hashes):
        assert reader._read_page("kv", one, pool, (6 - n) * PAGE)
    slots = [*range(6 * PAGE, 7 * PAGE), *range(5 * PAGE, 6 * PAGE)]
    for n, layer in enumerate(ours.layers):
        found = stored(ours, own, layer, {0: [5, 2]}, 32)
        for field, values in at(pool, n, slots).items():
            assert np.array_equal(found[field].ravel(), values.ravel())


def test_objects_of_the_unified_scheme(tmp_path: Path) -> None:
    """Chunks of layers and head groups, cut and named by SGLang's functions."""
    pool = host("page_unified", groups=2)
    theirs = scheme.plan_unified_kv(
        model_id="org/model", dtype="bfloat16", page_size=PAGE, rank_replicated=False,
        local_kv_heads=4, attn_tp_rank=0, attn_tp_size=1, attn_cp_size=1, start_layer=0,
        end_layer=3, is_final_stage=True, head_group=2, layer_partition=2,
    )  # fmt: skip
    space = PageNamespace(
        model_id="org/model", dtype="bfloat16", page_size=PAGE, total_kv_heads=4,
        layer_partition=2, head_group=2,
    )  # fmt: skip
    assert space.digest == scheme.namespace_digest(theirs.namespace)
    (page_hash,) = page_hashes(list(range(PAGE)), PAGE)
    chunks = [(layers, n) for layers in theirs.layer_ranges for n in range(2)]
    names = [space.name(page_hash, layers=layers, group=n) for layers, n in chunks]
    assert names == [f"{page_hash}_{suffix}" for suffix in theirs.suffixes]
    backend = file_backend(tmp_path, False)
    suffix = rank_suffix("org/model")
    page = pool.kv_buffer[4].reshape(-1).view(torch.uint8)
    for name, (layers, group) in zip(names, chunks, strict=True):
        start, nbytes = pool.page_unified_layout.chunk_span(layers, group)
        assert backend.set(name, page[start : start + nbytes])
    ours = plan(DENSE, memory="1MiB", max_len=64)
    own = [np.zeros(one.nbytes, np.uint8) for one in ours.pools]
    for name, (layers, group) in zip(names, chunks, strict=True):
        held = page_buffer(
            DENSE, "page_unified", pages=1, page=PAGE, layers=range(*layers), tp=2, max_len=64
        )
        assert read_pages(PageFiles(tmp_path), [name + suffix], held) == 1
        own_layers = list(held.memory.plan.layers)
        move(held.memory, (ours, own), ({0: [0]}, {0: [7]}), PAGE, group, own_layers)
    slots = list(range(4 * PAGE, 5 * PAGE))
    for n, layer in enumerate(ours.layers):
        found = stored(ours, own, layer, {0: [7]}, PAGE)
        for field, values in at(pool, n, slots).items():
            assert np.array_equal(found[field].ravel(), values.ravel()), (layer, field)


def test_wrong_objects_and_pools_are_refused(tmp_path: Path) -> None:
    store, held = PageFiles(tmp_path), page_buffer(DENSE, "page_first", pages=1, page=PAGE)
    store.put([("short", [np.zeros(9, np.uint8)])])
    assert read_pages(store, ["short"], held) == 0
    for name in ("../up", "a/b", ".hidden"):
        with pytest.raises(AtlasError) as refusal:
            store.exists([name])
        assert refusal.value.code is Code.OUT_OF_RANGE
    for given in (lambda: page_buffer(DENSE, "diagonal", pages=1, page=PAGE),
                  lambda: describe_host_pool(DENSE, object())):  # fmt: skip
        with pytest.raises(AtlasError) as refusal:
            given()
        assert refusal.value.code is Code.ENGINE_REFUSES
