"""The limits, measured in the same run: what nobody can exceed, or what torch reaches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.cells import DEVICE, Case, milliseconds

GIB = 1 << 30
_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def _time(*calls: Callable[[], Any], graph: bool = True, repeat: int = 15) -> float:
    return milliseconds(Case(calls, 0, lambda: True), graph=graph, repeat=repeat)[0]


def copy_rate(nbytes: int = GIB, sets: int = 1) -> float:
    """Bytes read and written by a plain device-to-device copy, GB/s."""
    pairs = [
        tuple(torch.randint(0, 99, (nbytes // 4,), dtype=torch.int32, device=DEVICE) for _ in "ab")
        for _ in range(sets)
    ]
    calls = [lambda a=a, b=b: a.copy_(b) for a, b in pairs]
    # A captured copy may run on another engine than one that is called: the faster counts.
    return max(2 * nbytes / _time(*calls, graph=graph) / 1e6 for graph in (False, True))


def link_rate(to_host: bool, nbytes: int = GIB // 2) -> float:
    """One transfer between the device and pinned memory, GB/s."""
    there = torch.randint(0, 99, (nbytes // 4,), dtype=torch.int32, device=DEVICE)
    here = torch.empty(nbytes // 4, dtype=torch.int32, pin_memory=True)
    a, b = (here, there) if to_host else (there, here)
    return nbytes / _time(lambda: a.copy_(b, non_blocking=True), graph=False, repeat=7) / 1e6


def page_by_page(to_host: bool, page: int, count: int = 1024) -> float:
    """One asynchronous copy for each page, GB/s."""
    there = torch.randint(0, 99, (count, page // 4), dtype=torch.int32, device=DEVICE)
    here = torch.empty((count, page // 4), dtype=torch.int32, pin_memory=True)
    a, b = (here, there) if to_host else (there, here)
    pairs = [(a[i], b[(i * 7) % count]) for i in range(count)]

    def act() -> None:
        for one, other in pairs:
            one.copy_(other, non_blocking=True)

    return count * page / _time(act, graph=False, repeat=5) / 1e6


def dense_decode(
    sequences: int = 64, length: int = 8192, heads: int = 8, group: int = 4, dim: int = 128
) -> dict[str, float]:
    """Torch's attention over an unpaged cache, the heads of a group as queries: GB/s of K and V."""
    k, v = (
        torch.randn(sequences, heads, length, dim, dtype=torch.bfloat16, device=DEVICE)
        for _ in range(2)
    )
    q = torch.randn(sequences, heads, group, dim, dtype=torch.bfloat16, device=DEVICE)
    rates = {}
    for name, backend in _BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                taken = _time(lambda: functional.scaled_dot_product_attention(q, k, v), repeat=9)
            rates[name] = 2 * k.nbytes / taken / 1e6
        except RuntimeError as error:
            rates[name] = 0.0
            print(f"dense decode, {name}: {str(error)[:100]}")
    return rates


def dense_prefill(
    length: int = 8192, heads: int = 8, group: int = 4, dim: int = 128
) -> dict[str, float]:
    """Torch's causal attention of one sequence over itself: TFLOP/s."""
    q, k, v = (
        torch.randn(1, heads * group, length, dim, dtype=torch.bfloat16, device=DEVICE)
        for _ in range(3)
    )
    work = prefill_work(length, heads * group, dim)
    rates = {}
    for name, backend in _BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                taken = _time(
                    lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
                    repeat=7,
                )
            rates[name] = work / taken / 1e9
        except RuntimeError as error:
            rates[name] = 0.0
            print(f"dense prefill, {name}: {str(error)[:100]}")
    return rates


def matrix_product(size: int = 8192) -> float:
    """Torch's product of two square matrices of random numbers: TFLOP/s."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=DEVICE) for _ in "ab")
    return 2.0 * size**3 / _time(lambda: a @ b, repeat=9) / 1e9


def prefill_work(length: int, heads: int, dim: int) -> float:
    """Operations of causal attention: two products over half of the square."""
    return 2.0 * heads * length * length * dim
