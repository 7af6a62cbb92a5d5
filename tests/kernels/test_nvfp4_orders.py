"""nvfp4 in every order: planned, bound, written, read and attended, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvatlas.planning.backends import EVERY_ORDER

torch = pytest.importorskip("torch")

from kvatlas.kernels import attend, read, write
from kvatlas.kernels.quantise import encode
from kvatlas.specs import FullAttention
from tests.guards import cache_of

SPEC = FullAttention(heads=4, head_dim=32, cache="nvfp4")
TOKENS, BLOCK = 37, 16
TABLE = [3, 1, 2]


def rows(seed: int, count: int = TOKENS) -> Any:
    return torch.randn(count, 4, 32, generator=torch.Generator().manual_seed(seed))


def slots() -> Any:
    return torch.tensor([TABLE[t // BLOCK] * BLOCK + t % BLOCK for t in range(TOKENS)])


def filled(order: str) -> tuple[Any, Any]:
    guarded, layer = cache_of(SPEC, order, block_size=BLOCK)
    write(layer, rows(1), rows(2), slots())
    guarded.check()
    return guarded, layer


@pytest.mark.parametrize("order", EVERY_ORDER)
def test_every_byte_is_where_the_placement_says(order: str) -> None:
    guarded, layer = filled(order)
    expected = np.zeros_like(layer.buffer.numpy())
    for side, given in (("k", rows(1)), ("v", rows(2))):
        for name, values in encode(layer.spec, side, given).items():  # type: ignore[arg-type]
            placed, data = layer.place(name), values.view(torch.uint8).numpy()
            for t, h, c in np.ndindex(*data.shape):
                expected[placed(B=TABLE[t // BLOCK], N=t % BLOCK, H=h, C=c)] = data[t, h, c]
    assert np.array_equal(layer.buffer.numpy(), expected)
    others = (guarded.cache[f"layers.{i}.attn"].tensor for i in (0, 2))
    assert not any(bool(other.any()) for other in others)


@pytest.mark.parametrize("order", EVERY_ORDER)
def test_rows_and_attention_are_those_of_lbhnc(order: str) -> None:
    tables: dict[str, Any] = {
        "tables": torch.tensor([TABLE]),
        "lengths": torch.tensor([TOKENS]),
        "queries": torch.tensor([3]),
        "scale": 0.2,
    }
    (_, first), (_, layer) = filled("LBHNC"), filled(order)
    for one, other in zip(read(first, slots()), read(layer, slots()), strict=True):
        assert torch.equal(one, other)
    q = rows(3, 3).repeat(1, 2, 1)
    assert torch.equal(attend(first, q, **tables), attend(layer, q, **tables))
