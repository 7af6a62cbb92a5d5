"""A decode step of transformers on planned pages, beside the sum of its kernels and its own cache.

    python -m benchmarks.gpu.steps

The model is a Llama of 16 layers, 4,096 wide, in bf16 with random weights. `own` is transformers'
cache under sdpa, `gathered` an AtlasCache under sdpa, `pages` one whose pages attention reads,
`graph` the same as a captured step. `kernels` is what the GPU is busy with in a captured step:
what no step can be faster than.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks.gpu import tables
from benchmarks.gpu.step_times import StepTimes
from kvatlas.engines.transformers import AtlasCache, DecodeGraph

SIZES = ((16, 2_048), (16, 16_384), (1, 4_096))
"""Sequences, and tokens that each has in the cache."""
_STEPS = 8
_TURNS = 3
_BESIDE = 48
"""Steps of transformers' own cache, and of gathered rows, that are measured in turn."""
_MOST = 64
"""Tokens that steps add to a cache, at most."""
_CONFIG: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4_096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "dtype": "bfloat16",
}


def model(layers: int = _CONFIG["num_hidden_layers"]) -> Any:
    """The model, on the GPU; with fewer layers it launches the same kernels."""
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        made = LlamaForCausalLM(LlamaConfig(**_CONFIG | {"num_hidden_layers": layers})).eval()
        torch.set_default_dtype(torch.float32)
    return made


def compile_steps() -> None:
    """A step of every size on pages, of a model of one layer."""
    llama = model(layers=1)
    with torch.no_grad():
        for size in SIZES:
            for attention in ("sdpa", "kvatlas"):
                _stepping(llama, _pages(llama, *size), attention, *size)(0)


def measure(llama: Any, *size: int) -> tuple[float, float, float, float]:
    """Milliseconds of a step of one size: own, gathered, pages, graph."""
    # Gathered rows lie as transformers' own do, and cuDNN keeps its plans by shapes and strides:
    # with lengths of their own, none finds a plan that the other has paid for.
    longer = size[0], size[1] + _BESIDE + 1
    # A step is a plan most of all, and plans vary by a tenth: so single steps by turns, and many.
    own, gathered = _milliseconds(
        _stepping(llama, _own_cache(llama, *size), "sdpa", *size),
        _stepping(llama, _pages(llama, *longer), "sdpa", *longer),
        turns=_BESIDE, steps=1,
    )  # fmt: skip
    _give_back()
    (pages,) = _milliseconds(_stepping(llama, _pages(llama, *size), "kvatlas", *size))
    _give_back()
    cache = _pages(llama, *size)
    step = _stepping(llama, cache, "kvatlas", *size)
    with DecodeGraph(llama, cache):
        (graph,) = _milliseconds(step)
    del cache, step
    _give_back()
    return own, gathered, pages, graph


def measure_kernels(llama: Any, *size: int) -> float:
    """Milliseconds in which the GPU is busy with a captured step of one size."""
    cache = _pages(llama, *size)
    step = _stepping(llama, cache, "kvatlas", *size)
    with DecodeGraph(llama, cache):
        _milliseconds(step)
        kernels = _kernel_time(step)
    del cache, step
    _give_back()
    return kernels


def _stepping(
    llama: Any, cache: Any, attention: str, sequences: int, tokens: int
) -> Callable[[int], None]:
    """What makes a step, by its number: one token for each sequence."""
    ids = torch.ones((sequences, 1), dtype=torch.long, device="cuda")

    def step(number: int) -> None:
        if llama.config._attn_implementation != attention:
            llama.set_attn_implementation(attention)
        place = torch.full_like(ids, tokens + number)
        llama(ids, position_ids=place, past_key_values=cache, use_cache=True).logits.argmax(-1)

    return step


def _own_cache(llama: Any, sequences: int, tokens: int) -> Any:
    cache = DynamicCache(config=llama.config)
    heads, dim = _CONFIG["num_key_value_heads"], llama.config.head_dim
    for layer in range(_CONFIG["num_hidden_layers"]):
        rows = torch.randn((sequences, heads, tokens, dim), dtype=torch.bfloat16, device="cuda")
        cache.update(rows, rows, layer)
    return cache


def _pages(llama: Any, sequences: int, tokens: int) -> AtlasCache:
    most = tokens + _MOST
    cache = AtlasCache.from_config(
        llama.config, batch=sequences, max_len=most, device="cuda:0", layout="LBNHC"
    )
    cache.adopt(tokens, sequences)
    return cache


def _milliseconds(
    *ways: Callable[[int], None], turns: int = _TURNS, steps: int = _STEPS
) -> list[float]:
    """Of one step in each way: medians of turns, by turns, of so many steps each.

    A turn is timed from its first launch to the end of its last; the first of all is not.
    """
    times: list[list[float]] = [[] for _ in ways]
    with torch.no_grad():
        for turn in range(turns + 1):
            for step, taken in zip(ways, times, strict=True):
                torch.cuda.synchronize()
                began = time.perf_counter()
                for number in range(turn * steps, (turn + 1) * steps):
                    step(number)
                torch.cuda.synchronize()
                if turn:
                    taken.append((time.perf_counter() - began) / steps * 1e3)
    return [statistics.median(taken) for taken in times]


def _kernel_time(step: Callable[[int], None]) -> float:
    """Milliseconds in which the GPU is busy with one step, by its own clock."""
    first = _STEPS * (_TURNS + 1)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.no_grad(), torch.profiler.profile(activities=activities) as seen:
        for number in range(4):
            step(first + number)
        torch.cuda.synchronize()
    busy: float = sum(event.self_device_time_total for event in seen.key_averages())
    return busy / 4 / 1e3


def _give_back() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def table() -> list[StepTimes]:
    """Print the table; what was measured."""
    llama = model()
    taken = [measure(llama, *size) for size in SIZES]
    # Only now: a profiler that was there once may slow launches down until the process ends.
    found = [
        StepTimes(*size, *times, measure_kernels(llama, *size))
        for size, times in zip(SIZES, taken, strict=True)
    ]
    columns = ("cached", "own", "gathered", "pages", "graph", "kernels", "share", "1.25x", "own ")
    tables.show(
        "A decode step of transformers (16 layers, bf16), ms", columns,
        [one.row() for one in found], left="c",
    )  # fmt: skip
    return found


if __name__ == "__main__":
    table()
