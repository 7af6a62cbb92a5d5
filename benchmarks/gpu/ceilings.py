"""The limits, measured in the same run: what nobody can exceed, or what torch reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.cells import DEVICE
from benchmarks.gpu.replays import LONG, Case, Player, milliseconds, ready, times, warm_up

GIB = 1 << 30
_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def _time(*calls: Callable[[], Any], graph: bool = True, repeat: int = 15) -> float:
    return milliseconds(Case(calls, 0, lambda: True), graph=graph, repeat=repeat)[0]


def _copies(nbytes: int, sets: int) -> Case:
    """Plain device-to-device copies; the work is the bytes that are read and written."""
    pairs = [
        tuple(torch.randint(0, 99, (nbytes // 4,), dtype=torch.int32, device=DEVICE) for _ in "ab")
        for _ in range(sets)
    ]
    return Case([partial(a.copy_, b) for a, b in pairs], 2 * nbytes, lambda: True)


def rate_of(player: Player, repeat: int = 15) -> float:
    """What is done in a second, in 1e9: of bytes, GB/s."""
    warm_up(player)
    return player.case.work / median(times(player, repeat, LONG)) / 1e6


def fastest(players: Iterable[Player]) -> tuple[Player, float]:
    """The fastest of several, and its rate."""
    return max(((player, rate_of(player)) for player in players), key=lambda one: one[1])


def copy_limit(*sizes: int, sets: int = 1) -> tuple[Player, float]:
    """The fastest plain copy of one of these sizes, which cells can take turns with; GB/s."""
    # A captured copy may run on another engine than one that is called: the faster counts.
    return fastest(
        ready(_copies(size, sets), graph=graph) for size in sizes for graph in (False, True)
    )


def copy_rate(nbytes: int = GIB, sets: int = 1) -> float:
    """Bytes read and written by a plain device-to-device copy, GB/s."""
    return copy_limit(nbytes, sets=sets)[1]


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


def dense_limit(
    sequences: int = 64, length: int = 8192, heads: int = 8, group: int = 4, dim: int = 128
) -> tuple[Player, float]:
    """The best of torch's attention over an unpaged cache, and its GB/s of K and V.

    The heads of a group are its queries.
    """
    k, v = (
        torch.randn(sequences, heads, length, dim, dtype=torch.bfloat16, device=DEVICE)
        for _ in range(2)
    )
    q = torch.randn(sequences, heads, group, dim, dtype=torch.bfloat16, device=DEVICE)
    players = []
    for name, backend in _BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                call = partial(functional.scaled_dot_product_attention, q, k, v)
                players.append(ready(Case([call], 2 * k.nbytes, lambda: True)))
        except RuntimeError as error:
            print(f"dense decode, {name}: {str(error)[:100]}")
    return fastest(players)


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
