"""vLLM's own configs described: blocks, groups and every byte of every field are where it says.

Each config is planned as vLLM plans it, its layers become vLLM's own spec objects, vLLM lays
them out, and what is described of that must be the plan; then bytes go from buffers of that
shape to another topology. `KVATLAS_FACTS` names a folder whose `configs/` are tried too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvatlas import AtlasError
from kvatlas.engines.vllm.describe import check_tensors, describe_stage, join_stages
from kvatlas.engines.vllm.transfer_groups import TransferGroup
from kvatlas.errors import Code
from kvatlas.geometry import Layout
from kvatlas.models import Model
from kvatlas.planning import Plan, plan
from kvatlas.routing import fingerprint, route
from kvatlas.specs import (
    CrossAttention,
    FullAttention,
    Recurrent,
    Ring,
    SinkAttention,
)
from tests.models.configs import FAMILIES
from tests.vllm.kv_cache_configs import DTYPES, kv_cache_config
from tests.vllm.planning_functions import PLANNING

FACTS = os.environ.get("KVATLAS_FACTS")
SMALL = list(product((1, 2, 4), (None, "LBHNC", "BLHNC", "BHLNC"), ("auto", "fp8")))
LARGE = [(1, None, "auto"), (8, None, "auto"), (8, "BLHNC", "auto"), (8, None, "fp8")]
"""Ranks, order and cache dtype: of reduced configs, and of whole models."""


def configs() -> Iterator[tuple[str, Any]]:
    yield from FAMILIES.items()
    for path in sorted(Path(FACTS, "configs").glob("*.json")) if FACTS else ():
        yield path.stem, json.loads(path.read_bytes())


def vllm_config(made: Plan, model: Model, config: Any, cache: str) -> Any:
    served = SimpleNamespace(
        model=made.model,
        dtype=DTYPES[model.dtype],
        max_model_len=made.max_len,
        hf_config=config,
        get_total_num_kv_heads=lambda: 0,
        get_total_num_hidden_layers=lambda: model.depth,
        model_arch_config=SimpleNamespace(total_num_attention_heads=model.attention_heads),
    )
    return SimpleNamespace(
        model_config=served,
        parallel_config=SimpleNamespace(tensor_parallel_size=made.tp),
        cache_config=SimpleNamespace(cache_dtype=cache),
    )


def planned(config: Any, cache: str, **ask: Any) -> tuple[Model, Plan] | None:
    """A plan as vLLM makes it, or None where it makes none."""
    model = Model.load(config)
    kv_dtype = None if cache == "auto" else cache
    try:
        made = plan(
            model, memory="6GiB", max_len=4096, in_flight=0, policy="vllm", kv_dtype=kv_dtype,
            **ask,
        )  # fmt: skip
    except AtlasError:
        return None
    return model, made


WITH_RINGS = ("qwen4", "glm5_next", "step5", "deepseek_v41")


@pytest.mark.parametrize(("name", "config"), list(configs()))
def test_what_vllm_lays_out_is_the_plan(name: str, config: Any) -> None:
    described_some = False
    for tp, layout, cache in SMALL if name in FAMILIES else LARGE:
        found = planned(config, cache, tp=tp, layout=layout)
        if found is None or _kept_by_others(found[1]):
            continue
        described_some = True
        assert_described(*found, config, cache, (name, tp, layout, cache))
    assert described_some or name in ("whisper", "bart", *WITH_RINGS)


def _kept_by_others(made: Plan) -> bool:
    """Encoders, which vLLM's connectors are not asked about, sinks, which no model here has, and
    rings, which vLLM 0.32 does not have: `test_layer_specs.py` describes them."""
    kinds = CrossAttention | SinkAttention | Ring
    return any(isinstance(made.spec(name), kinds) for name in made.layers)


def assert_described(model: Model, made: Plan, config: Any, cache: str, what: object) -> None:
    theirs = kv_cache_config(made, model)
    kernels = {name: made.region_of(name)[0].kernel_block for name in made.layers}
    for layer in made.layers:
        if isinstance(made.spec(layer), Recurrent):
            kernels[layer] = made.region_of(layer)[0].block
    stage = describe_stage(vllm_config(made, model, config, cache), theirs, kernel_blocks=kernels)
    seen = join_stages([stage])
    assert theirs.num_blocks == made.num_blocks == seen.num_blocks, what
    assert [group.block for group in seen.groups] == [group.block for group in made.groups], what
    assert set(seen.layers) == set(made.layers)
    for layer in made.layers:
        for field in made.page(layer).fields:
            if not field.padding:
                assert seen.view(layer, field.name) == made.view(layer, field.name), (what, layer)
    assert fingerprint(seen) == fingerprint(made), what
    route(seen, made)


def test_tensors_that_are_not_the_plans_are_refused_by_the_layers_name() -> None:
    config = FAMILIES["gemma2"] if "gemma2" in FAMILIES else FAMILIES["llama"]
    found = planned(config, "auto", layout="LBHNC")
    assert found is not None
    model, made = found
    theirs = kv_cache_config(made, model)
    stage = describe_stage(vllm_config(made, model, config, "auto"), theirs)
    seen = join_stages([stage])
    raw = torch.empty(theirs.kv_cache_tensors[0].size + 64, dtype=torch.int8)[64:]
    specs = {
        name: group.kv_cache_spec for group in theirs.kv_cache_groups for name in group.layer_names
    }
    views: dict[str, Any] = {}
    for tensor in theirs.kv_cache_tensors:
        made_views = create_kv_cache_views(
            raw, specs[tensor.layers[0]], theirs.num_blocks, KVCacheLayout.LBHNC, tensor
        )
        views |= dict(zip(tensor.layers, made_views, strict=True))
    assert check_tensors(seen, stage, views) == raw.data_ptr()
    first, last = seen.layers[0], seen.layers[-1]
    wrong = {
        "shape": {**views, last: views[last][:-1]},
        "strides": {**views, last: views[last].transpose(1, 2).contiguous().transpose(1, 2)},
        "place": {**views, last: views[first]} if first != last else {},
        "missing": {name: view for name, view in views.items() if name != last},
    }
    for why, tensors in wrong.items():
        with pytest.raises(AtlasError) as refusal:
            check_tensors(seen, stage, tensors)
        assert refusal.value.code is Code.ENGINE_REFUSES, why
        assert last in str(refusal.value), why


def test_windows_that_vllm_keeps_whole_are_known_to_the_schedulers_side() -> None:
    """Without the hybrid manager: merged with layers that see all tokens, or beside them."""
    about: dict[str, Any] = {"block_size": 64, "head_size": 32, "dtype": torch.float32}
    off = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
    )
    for heads in (2, 4):
        for local in (
            SlidingWindowSpec(**about, num_kv_heads=2, sliding_window=96),
            ChunkedLocalAttentionSpec(**about, num_kv_heads=2, attention_chunk_size=96),
        ):
            full = FullAttentionSpec(**about, num_kv_heads=heads)
            (group,) = PLANNING.get_kv_cache_groups(off, {"l.0.attn": full, "l.1.attn": local})
            known = TransferGroup(group.kv_cache_spec, 0)
            assert set(known.windows_kept_whole) == {96}, (heads, local)
            assert not known.partial


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_the_cpu_kernel_writes_is_where_the_plan_says(dtype: torch.dtype) -> None:
    """K is transposed over the whole block: found by writing rows with vLLM's own kernel."""
    ops = pytest.importorskip("vllm._custom_ops")
    attention = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")
    for block, heads, dim in ((32, 2, 32), (64, 1, 64), (128, 3, 128)):
        blocks, item = 3, dtype.itemsize
        name = str(dtype).removeprefix("torch.")
        spec = FullAttention(heads=heads, head_dim=dim, dtype=name, packing="transposed")
        page = spec.page(block)
        placed = page.place(Layout("LBHNC"), pages=1, blocks=blocks).select("L", 0)
        memory = np.zeros(blocks * page.nbytes, np.uint8)
        cache = torch.from_numpy(memory).view(dtype).view(blocks, heads, block, 2 * dim)
        slots = torch.randperm(blocks * block)[: 2 * block + 5]
        k, v = (torch.randn(len(slots), heads, dim).to(dtype) for _ in range(2))
        sides = cache.view(blocks, heads, 2 * block, dim).chunk(2, dim=2)
        isa = attention._get_attn_isa(dtype, block, dim)
        ops.cpu_attn_reshape_and_cache(k, v, *sides, slots, isa)
        for field, rows in (("k", k), ("v", v)):
            view = page.view(placed, field)
            own = slots.numpy()[:, None, None]
            every = np.arange(heads)[None, :, None], np.arange(dim)[None, None, :]
            at = np.broadcast_arrays(own // block, every[0], own % block, every[1])
            axes = {axis: one.reshape(-1) for axis, one in zip("BHNC", at, strict=True)}
            where = np.asarray(view(**axes)) // item
            got = cache.reshape(-1)[torch.from_numpy(where)].reshape(rows.shape)
            assert torch.equal(got, rows), (field, block, isa)
