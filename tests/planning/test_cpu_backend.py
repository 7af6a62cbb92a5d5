"""What vLLM's CPU attention keeps in a page: K transposed, then V."""

from __future__ import annotations

from typing import Any

from kvatlas.geometry import Placement
from kvatlas.models import Layer, Model
from kvatlas.planning import foreign, plan
from kvatlas.specs import FullAttention, SlidingAttention


def test_the_cpu_backend_keeps_keys_transposed() -> None:
    for policy in ("vllm", "uniform", "atlas"):
        made = plan(
            "Llama-3.1-8B", memory="1GiB", backend="CPU_ATTN", block_size=64, max_len=64,
            policy=policy,
        )  # fmt: skip
        name = made.layers[0]
        assert made.layout == "LBHNC"
        assert made.spec(name).packing == "transposed"  # type: ignore[attr-defined]
        item, states, dim = 2, 64, 128
        k, v = (made.view(name, field) for field in "kv")
        assert (k.stride("N"), k.stride("C")) == (item, item * states)
        assert (v.stride("N"), v.stride("C")) == (item * dim, item)
        assert v.offset - k.offset == item * states * dim


def test_windows_that_an_engine_keeps_at_full_length_share_a_table_with_the_others() -> None:
    """vLLM without its hybrid manager: one group, whose first layer sees a window alone."""
    sizes: dict[str, Any] = {"heads": 2, "head_dim": 8}
    layers = (
        Layer(name="0", index=0, spec=SlidingAttention(**sizes, window=16)),
        Layer(name="1", index=1, spec=FullAttention(**sizes)),
    )
    model = Model(name="m", architecture="m", layers=layers, depth=2, attention_heads=2)
    page = 2 * 16 * 16
    tensors = {
        name: Placement(("B", "H", "N", "C"), (4, 2, 16, 16), (2 * page, 512, 32, 2), at, 2)
        for name, at in (("0", 0), ("1", 8 * page))
    }
    one = foreign(model, tensors, groups=[["0", "1"]])
    assert [group.kind for group in one.groups] == ["full_attention"]
    for full, kinds in (
        ((), ["sliding_window", "full_attention"]),
        (("0",), ["full_attention"] * 2),
    ):
        two = foreign(model, tensors, groups=[["0"], ["1"]], full=full)
        assert [group.kind for group in two.groups] == kinds
