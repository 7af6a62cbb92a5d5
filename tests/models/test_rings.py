"""Readers of models that keep the tokens of an incomplete group in a ring, as in vLLM 0.33."""

from __future__ import annotations

from typing import Any

import pytest

from kvatlas import AtlasError, Code
from kvatlas.models import Model
from kvatlas.planning import plan
from kvatlas.routing import route
from kvatlas.specs import (
    FullAttention,
    GatedDeltaNet,
    Indexer,
    KimiDelta,
    LatentAttention,
    Ring,
    SlidingAttention,
    SlidingLatentAttention,
)
from tests.models.configs import FAMILIES

NAMES = ("qwen4", "glm5_next", "step5", "deepseek_v41")
QWEN4, GLM5, STEP5, V41 = (FAMILIES[name] for name in NAMES)


def kinds(model: Model) -> list[list[type]]:
    """The kinds of caches of each decoder layer, in order."""
    found: list[list[type]] = [[] for _ in range(model.depth)]
    for layer in model.layers:
        found[layer.index].append(type(layer.spec))
    return found


def rings(model: Model) -> dict[str, Ring]:
    return {layer.name: layer.spec for layer in model.layers if isinstance(layer.spec, Ring)}


def test_qwen4_keeps_raw_keys_of_the_open_group() -> None:
    model = Model.load(QWEN4)
    assert not model.warnings
    assert kinds(model) == ([[GatedDeltaNet]] * 3 + [[Ring, Indexer, FullAttention]]) * 2
    assert rings(model) == {
        f"model.layers.{n}.self_attn.indexer.raw_key_cache": Ring(group=4, rows=4, width=128)
        for n in (3, 7)
    }
    without = {key: value for key, value in QWEN4.items() if not key.startswith("indexer")}
    assert kinds(Model.load(without)) == ([[GatedDeltaNet]] * 3 + [[FullAttention]]) * 2


def test_qwen4_with_images_stores_the_coordinates_of_a_token() -> None:
    """vLLM appends three int64 to a row where rotary sections are given."""
    text = {**QWEN4, "rope_parameters": {"mrope_section": [11, 11, 10], "rope_type": "default"}}
    whole = {
        "architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp",
        "text_config": text,
    }  # fmt: skip
    for config, content in ((whole, 128 * 2 + 3 * 8), (text, 128 * 2)):
        found = {ring.page(1).content for ring in rings(Model.load(config)).values()}
        assert found == {content}


def test_layer_types_of_older_releases_of_transformers_are_read() -> None:
    """transformers 5.17 calls attention with an indexer qwen_sparse_attention."""
    words = ["linear_attention"] * 3 + ["indexed_attention"]
    now = Model.load(QWEN4 | {"layer_types": words * 2})
    older = [word.replace("indexed", "qwen_sparse") for word in words]
    assert Model.load(QWEN4 | {"layer_types": older * 2}).layers == now.layers
    assert len(now.layers) == 12


def test_glm5_next_keeps_keys_and_scores_of_the_open_pool() -> None:
    model = Model.load(GLM5)
    assert kinds(model) == ([[KimiDelta]] * 3 + [[Indexer, Ring, LatentAttention]]) * 2
    latent = next(x.spec for x in model.layers if isinstance(x.spec, LatentAttention))
    assert (latent.latent, latent.rope, latent.page(64).content) == (512, 0, 1024)
    for name, ring in rings(model).items():
        assert name.endswith("self_attn.indexer.tail_cache")
        page = ring.page(16)
        assert (page.heads, page.states, page.content) == (2, 16, 256)
    section = {"head_dim": 128, "num_heads": 64, "short_conv_kernel_size": 4}
    nested = {key: value for key, value in GLM5.items() if not key.startswith("linear_")}
    assert Model.load(nested | {"linear_attn_config": section}).layers == model.layers


def test_step5_has_summaries_and_a_ring_in_full_layers() -> None:
    words = ["full_attention", "sliding_attention"]
    model = Model.load(STEP5 | {"layer_types": words * 2})
    assert kinds(model) == [[FullAttention, Indexer, Ring], [SlidingAttention]] * 2
    assert {ring.row_bytes for ring in rings(model).values()} == {1024}
    summary = next(x.spec for x in model.layers if isinstance(x.spec, Indexer))
    assert summary.page(16).nbytes == 2 * 256
    dense = Model.load(STEP5 | {"sparse_config": None})
    assert kinds(dense) == [[SlidingAttention], [FullAttention]] * 2


def v41(**text: Any) -> Model:
    return Model.load({**V41, "text_config": {**V41["text_config"], **text}})


def test_deepseek_v41_stores_compressed_rows_in_a_few_layers() -> None:
    model = v41()
    window = [SlidingLatentAttention]
    source = [LatentAttention, Indexer, SlidingLatentAttention]
    halved = [*source, Ring]
    assert kinds(model) == [window, halved, window, halved, window, source, window, window]
    assert set(rings(model).values()) == {Ring(group=2, rows=8, width=1024, dtype="fp32")}
    assert next(iter(rings(model))) == ("language_model.model.layers.1.attn.compressor.state_cache")
    rows = [x.spec.compress for x in model.layers if type(x.spec) is LatentAttention]
    assert rows == [2, 2, 1]
    assert {x.spec.page(64).nbytes for x in model.layers if isinstance(x.spec, Indexer)} == {
        4608, 8640,  # 64 / 2 and 64 keys of 132 bytes, in multiples of 576
    }  # fmt: skip
    flat = V41["text_config"] | {"architectures": V41["architectures"], "dtype": "bfloat16"}
    assert Model.load(flat).layers == model.layers


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ({"compress_ratios": [4] * 8}, "must be 0, 1 or 2"),
        ({"kv_source_layer_ids": [5]}, "or an earlier layer, must store them"),
        ({"kv_source_layer_ids": [9]}, "only layer numbers"),
        ({"kv_source_layer_ids": None}, "lacks a key"),
        ({"compress_ratios": None}, "lacks a key"),
    ],
)
def test_a_config_of_deepseek_v41_that_is_incomplete_is_refused(
    text: dict[str, Any], words: str
) -> None:
    with pytest.raises(AtlasError) as refusal:
        v41(**text)
    assert words in str(refusal.value)
    assert refusal.value.code in (Code.BAD_CONFIG, Code.MISSING_KEY)


def test_chips_store_other_records_of_deepseek_v41() -> None:
    """By hand: 584 bytes on Hopper; 528 for a window and 288 for compressed rows on Blackwell."""
    ask: dict[str, Any] = {"memory": "20GiB", "policy": "vllm", "max_len": 4096}
    for chip, records in (("sm90", {584}), ("sm120", {584}), ("sm100", {528, 288})):
        made = plan(v41(), chip=chip, **ask)
        specs = [made.spec(name) for name in made.layers]
        found = {x.page(64).content for x in specs if isinstance(x, LatentAttention)}
        assert found == records, chip

    chosen = plan(v41(), chip="sm100", kv_dtype="fp8_ds_mla", **ask)
    specs = [chosen.spec(name) for name in chosen.layers]
    assert {x.page(64).content for x in specs if isinstance(x, LatentAttention)} == {528}
    with pytest.raises(AtlasError) as refusal:
        plan(v41(), chip="sm100", kv_dtype="bf16", **ask)
    assert refusal.value.code is Code.BACKEND_REFUSES


def test_records_of_deepseek_v41_are_not_moved_between_chips() -> None:
    """Blackwell's kernels read other bytes: a route has to be refused, or to convert them."""
    ask: dict[str, Any] = {"memory": "20GiB", "policy": "vllm", "max_len": 4096}
    hopper, consumer, blackwell = (
        plan(v41(), chip=chip, **ask) for chip in ("sm90", "sm120", "sm100")
    )
    assert route(hopper, plan(v41(), chip="sm90", tp=8, **ask))
    assert route(hopper, consumer)
    for pair in ((hopper, blackwell), (blackwell, consumer)):
        with pytest.raises(AtlasError) as refusal:
            route(*pair)
        assert refusal.value.code is Code.UNLIKE_LAYERS


def test_a_stage_of_deepseek_v41_starts_with_a_layer_that_stores_rows() -> None:
    """Layer 4 reads the rows of layer 3, and layer 6 those of layer 5."""
    for pp, sound in ((1, True), (2, False), (3, False), (8, False)):
        if sound:
            plan(v41(), memory="20GiB", pp=pp, max_len=4096)
            continue
        with pytest.raises(AtlasError) as refusal:
            plan(v41(), memory="20GiB", pp=pp, max_len=4096)
        assert refusal.value.code is Code.BAD_TOPOLOGY
    moved = v41(kv_source_layer_ids=[1, 4, 5], index_source_layer_ids=[1, 4, 5])
    assert plan(moved, memory="20GiB", pp=2, max_len=4096).pp == 2


@pytest.mark.parametrize("config", [QWEN4, GLM5, STEP5, V41])
def test_no_key_is_left_unread(config: dict[str, Any]) -> None:
    assert not [text for text in Model.load(config).warnings if "was not read" in text]
