"""Tiny models of the families generate on the GPU: the tokens of transformers' own cache."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from kvatlas.engines.transformers import AtlasCache, DecodeGraph
from kvatlas.errors import AtlasError
from tests.engines.zoo import OTHERS, ZOO, model_of, prompts, tiny_of

STEPS = 24
LONGEST = 96
TWICE = 2.0
"""Logits in bf16 may be off by so many times as much as with transformers' own attention."""
FOR_KERNELS = tuple(name for name in OTHERS if name.endswith("for kernels"))
SERVED = [name for name in ZOO if tiny_of(name).argument == "past_key_values"]
WITHOUT_KERNEL = ("DeepseekV3", "DeepseekV32", "KimiLinear")
"""Their rotary parts are too narrow for a kernel: attention is torch's, and asks the device."""


@pytest.fixture(autouse=True)
def _whole_floats() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@cache
def on_gpu(name: str, dtype: torch.dtype = torch.float32) -> Any:
    model = deepcopy(model_of(name)).to(device="cuda", dtype=dtype)
    if any("expert" in module for module, _ in model.named_modules()):
        model.set_experts_implementation("batched_mm")  # the loop over experts asks the device
    return model


def inputs() -> dict[str, torch.Tensor]:
    return {key: rows.cuda() for key, rows in prompts().items()}


def tokens(model: Any, attention: str, pages: AtlasCache | None = None) -> torch.Tensor:
    model.set_attn_implementation(attention)
    given = inputs()
    more = {} if pages is None else {"past_key_values": pages}
    with torch.no_grad():
        ids = model.generate(**given, **more, max_new_tokens=STEPS, do_sample=False)
    new: torch.Tensor = ids[:, given["input_ids"].shape[1] :]
    return new


def pages_of(model: Any, layout: str = "LBNHC") -> AtlasCache:
    return AtlasCache.from_config(
        model.config, batch=3, max_len=LONGEST, device="cuda:0", layout=layout
    )


@pytest.mark.parametrize("name", [*SERVED, *FOR_KERNELS])
def test_tokens_are_those_of_transformers_own_cache(name: str) -> None:
    """In float32: rows gathered, pages read, and steps captured in a graph."""
    model = on_gpu(name)
    own = tokens(model, "eager")
    assert all(len(row.unique()) > 4 for row in own)
    assert tokens(model, "eager", pages_of(model)).equal(own)
    assert tokens(model, "kvatlas", pages_of(model)).equal(own)
    pages = pages_of(model)
    if name in WITHOUT_KERNEL:
        with DecodeGraph(model, pages), pytest.raises(AtlasError, match="cannot be captured"):
            tokens(model, "kvatlas", pages)
        return
    with DecodeGraph(model, pages) as graph:
        for _ in range(2):
            assert tokens(model, "kvatlas", pages).equal(own)
            pages.reset()
        assert graph.captured
    assert graph.steps == 2 * (STEPS - 1)


@pytest.mark.parametrize("name", [*SERVED, *FOR_KERNELS])
def test_logits_in_bf16_are_as_near_as_those_of_transformers(name: str) -> None:
    """Beside the same weights in float32, for the prompt and a token behind it."""
    half = on_gpu(name, torch.bfloat16)
    exact = deepcopy(half).float()
    given = inputs()
    mask = torch.nn.functional.pad(given["attention_mask"], (0, 1), value=1)
    step = {
        "input_ids": torch.tensor([[5], [6], [7]], device="cuda"),
        "attention_mask": mask,
        "position_ids": (mask.sum(1) - 1).unsqueeze(1),
    }

    def logits(model: Any, attention: str, pages: AtlasCache | None) -> torch.Tensor:
        model.set_attn_implementation(attention)
        with torch.no_grad():
            first = model(**given, past_key_values=pages, use_cache=True)
            kept = first.past_key_values
            behind = model(**step, past_key_values=kept, use_cache=True)
        return torch.cat((first.logits[:, -1:], behind.logits), dim=1).float()

    want = logits(exact, "eager", None)
    own = (logits(half, "eager", None) - want).abs().max()
    ours = (logits(half, "kvatlas", pages_of(half, "BHLNC")) - want).abs().max()
    assert float(own) > 0
    assert float(ours) <= TWICE * float(own)
