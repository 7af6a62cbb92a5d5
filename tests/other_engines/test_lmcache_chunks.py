"""Chunks of LMCache, allocated, stored and loaded by LMCache's own classes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvatlas import AtlasError, Code
from kvatlas.engines.lmcache import ChunkFiles, ChunkKey, chunk_buffer, describe_chunks
from kvatlas.engines.object_files import read_pages, write_pages
from kvatlas.models import Model
from kvatlas.planning import plan
from kvatlas.specs import FullAttention, LatentAttention
from tests.other_engines.engine_pools import move
from tests.other_engines.imports import lmcache
from tests.planning.test_engine_memory import several, states, tables_of
from tests.planning.test_foreign_fields import Tensor, seen

memory = lmcache("v1.memory_management")
allocators = lmcache("v1.memory_allocators.host_memory_allocator")

CHUNK, TOKENS, HEADS, WIDTH = 32, 80, 4, 16
DENSE = several("dense", 3, FullAttention(heads=HEADS, head_dim=WIDTH))
LATENT = several("latent", 3, LatentAttention(latent=64, rope=16))
ONE = Model(name="one", architecture="", layers=DENSE.layers[:1], depth=1, attention_heads=4)
SHAPES = {
    "KV_2LTD": (2, 3, CHUNK, HEADS * WIDTH),
    "KV_T2D": (CHUNK, 2, HEADS * WIDTH),
    "KV_2TD": (2, CHUNK, HEADS * WIDTH),
    "KV_MLA_FMT": (1, 3, CHUNK, 80),
}


def model_of(fmt: str) -> Model:
    return {"KV_2LTD": DENSE, "KV_MLA_FMT": LATENT}.get(fmt, ONE)


def chunks(fmt: str, count: int = 4) -> list[Any]:
    made = allocators.HostMemoryAllocator(1 << 20).batched_allocate(
        torch.Size(SHAPES[fmt]), torch.bfloat16, count, memory.MemoryFormat[fmt]
    )
    for n, one in enumerate(made):
        generator = torch.Generator().manual_seed(n)
        one.tensor[:] = torch.randn(one.tensor.shape, generator=generator).to(torch.bfloat16)
    return list(made)


def fields(fmt: str, array: Any, layer: int) -> dict[str, Tensor]:
    """Fields of a layer in chunks, whose axes are those that LMCache documents."""
    if fmt == "KV_MLA_FMT":
        rows = array[:, 0, layer]
        return {"latent": Tensor(rows[..., :64], "BNC"), "rope": Tensor(rows[..., 64:], "BNC")}
    paged = array.reshape(*array.shape[:-1], HEADS, WIDTH)
    sides: dict[str, Callable[[int], Any]] = {
        "KV_2LTD": lambda n: paged[:, n, layer],
        "KV_T2D": lambda n: paged[:, :, n],
        "KV_2TD": lambda n: paged[:, n],
    }
    return {name: Tensor(sides[fmt](n), "BNHC") for n, name in enumerate("kv")}


def arrays(given: list[Any]) -> Any:
    return np.stack([one.tensor.view(torch.int16).numpy().view(np.uint16) for one in given])


def options(fmt: str) -> dict[str, Any]:
    return {"max_len": 128} | ({} if "L" in fmt else {"layer": 0})


def assert_equal(fmt: str, made: Any, table: Any, array: Any, ours: Any, own: Any, to: Any) -> None:
    for n, layer in enumerate(made.layers):
        for name, tensor in fields(fmt, array, n).items():
            wanted = states(made, layer, tensor, table, TOKENS)
            found = states(ours, layer, seen(ours, own[0], layer, name, "u2"), to, TOKENS)
            assert np.array_equal(found.ravel(), wanted.ravel()), (layer, name)


@pytest.mark.parametrize("policy", ["vllm", "atlas"])
@pytest.mark.parametrize("fmt", SHAPES)
def test_chunks_move_there_and_back(fmt: str, policy: Any) -> None:
    model, given = model_of(fmt), chunks(fmt)
    described = describe_chunks(model, given, **options(fmt))
    made = described.plan
    assert (made.block_size, made.num_blocks) == (CHUNK, len(given))
    ours = plan(model, memory="1MiB", policy=policy, max_len=128)
    own = [np.zeros(one.nbytes, np.uint8) for one in ours.pools]
    tables = tables_of(made, TOKENS, first=1), tables_of(ours, TOKENS, first=2)
    move(described, (ours, own), tables, TOKENS)
    assert_equal(fmt, made, tables[0], arrays(given), ours, own, tables[1])
    again = chunks(fmt)
    for one in again:
        one.tensor.zero_()
    back = {0: [3, 0, 2]}
    move((ours, own), describe_chunks(model, again, **options(fmt)), (tables[1], back), TOKENS)
    assert_equal(fmt, made, back, arrays(again), ours, own, tables[1])


class Backend:
    """The part of LMCache's CPU backend that its file connector uses."""

    def __init__(self, fmt: str) -> None:
        config = lmcache("v1.config").LMCacheEngineConfig.from_defaults(chunk_size=CHUNK)
        shape = SHAPES[fmt]
        kv = (3, 1, CHUNK, 1, 80) if fmt == "KV_MLA_FMT" else (3, 2, CHUNK, HEADS, WIDTH)
        self.config, self.shape = config, shape
        self.metadata = lmcache("v1.metadata").LMCacheMetadata(
            model_name="org/model", world_size=1, local_world_size=1, worker_id=0,
            local_worker_id=0, kv_dtype=torch.bfloat16, kv_shape=kv, chunk_size=CHUNK,
            use_mla=fmt == "KV_MLA_FMT",
        )  # fmt: skip
        self.allocator = allocators.HostMemoryAllocator(1 << 20)

    def allocate(self, shapes: Any, dtypes: Any, fmt: Any) -> Any:
        return self.allocator.allocate(shapes, dtypes, fmt)


@pytest.mark.parametrize("fmt", ["KV_2LTD", "KV_MLA_FMT"])
def test_files_of_lmcache_are_read_and_ours_by_lmcache(fmt: str, tmp_path: Path) -> None:
    connector = lmcache("v1.storage_backend.connector.fs_connector")
    key_of = lmcache("utils").CacheEngineKey
    hashes, given = [0xABC, 0x123456789, 0x7], chunks(fmt, 3)
    keys = [key_of("org/model", 1, 0, one, torch.bfloat16) for one in hashes]

    def run(folder: Path, act: Any) -> Any:
        async def go() -> Any:
            backend = Backend(fmt)
            loop = asyncio.get_running_loop()
            their = connector.FSConnector(loop, backend, backend.config, base_paths_str=str(folder))
            return [await act(their, n, key) for n, key in enumerate(keys)]

        return asyncio.run(go())

    run(tmp_path, lambda their, n, key: their.put(key, given[n]))
    names = [ChunkKey("org/model", 1, 0, one, "bf16").name for one in hashes]
    assert names == [key.to_string() for key in keys]
    store = ChunkFiles(tmp_path, fmt, dtype="bf16", shape=SHAPES[fmt])
    held = chunk_buffer(model_of(fmt), fmt, chunks=4, tokens=CHUNK, max_len=128)
    assert sorted(store.names()) == sorted(names)
    assert read_pages(store, [*names, "absent"], held) == 3
    for n, one in enumerate(given):
        assert held.pages[n].tobytes() == arrays([one]).tobytes()
    ours = plan(model_of(fmt), memory="1MiB", max_len=128)
    own = [np.zeros(one.nbytes, np.uint8) for one in ours.pools]
    to = tables_of(ours, TOKENS, first=2)
    move(held.memory, (ours, own), ({0: [0, 1, 2]}, to), TOKENS)
    assert_equal(fmt, held.memory.plan, {0: [0, 1, 2]}, arrays(given), ours, own, to)
    folder = tmp_path / "ours"
    folder.mkdir()
    write_pages(ChunkFiles(folder, fmt, dtype="bf16", shape=SHAPES[fmt]), names, held)
    for path in folder.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()
    loaded = run(folder, lambda their, _, key: their.get(key))
    for one, wanted in zip(loaded, given, strict=True):
        assert torch.equal(one.tensor, wanted.tensor)


def test_wrong_chunks_are_refused(tmp_path: Path) -> None:
    given = chunks("KV_2LTD")
    wrong: list[tuple[Any, dict[str, Any], Code]] = [
        (given[::-1], {}, Code.BAD_TENSOR),
        ([given[0], given[1], given[3]], {}, Code.BAD_TENSOR),
        (given, {"version": "0.3.0"}, Code.ENGINE_REFUSES),
        (given, {"tp": 2}, Code.BAD_TENSOR),
        (chunks("KV_T2D"), {}, Code.ENGINE_REFUSES),
    ]
    for those, more, code in wrong:
        with pytest.raises(AtlasError) as refusal:
            describe_chunks(DENSE, those, max_len=128, **more)
        assert refusal.value.code is code, refusal.value
    (tmp_path / "a.data").write_bytes(b"\1" * 64)
    store = ChunkFiles(tmp_path, "KV_2LTD", dtype="bf16", shape=SHAPES["KV_2LTD"])
    with pytest.raises(AtlasError) as refusal:
        store.get([("a", [np.zeros(36, np.uint8)])])
    assert refusal.value.code is Code.UNREADABLE
