"""Kernels that are launched again: for batches like the one that they were compiled for alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

from kvatlas import AtlasError, Code
from kvatlas.kernels.triton import (
    attend,
    launch_write,
    relaunch,
    schedule,
    split_of,
    write,
)
from kvatlas.kernels.triton.attention import batch_kind, launch
from kvatlas.kernels.triton.attention.layer_launch import LayerLaunch
from kvatlas.specs import FullAttention
from tests.kernels.triton.cases import Pool

HEADS, DIM = 4, 16
CHIP = make_backend(GPUTarget("cuda", 90, 32))


def compiled_for(argument: Any) -> Any:
    """What Triton compiles for an argument."""
    if isinstance(argument, tuple):
        return tuple(compiled_for(one) for one in argument)
    return native_specialize_impl(type(CHIP), argument, False, True, True)


def pick(rng: np.random.Generator, some: list[Any]) -> Any:
    return some[rng.integers(len(some))]


def odd(shape: tuple[int, ...], dtype: Any, rng: np.random.Generator) -> Any:
    """A tensor that may start anywhere, with rows that may lie apart."""
    wide = [*shape[:-1], shape[-1] + pick(rng, [*[0] * 12, 3, 16])]
    count = torch.Size(wide).numel()
    start = pick(rng, [*[0] * 12, 1, 4])
    memory = torch.zeros(count + start, dtype=dtype)
    return memory[start:].view(wide)[..., : shape[-1]]


def batch_of(rng: np.random.Generator) -> dict[str, Any]:
    count = pick(rng, [1, 2, 16, 17, 32, 48])
    integer = pick(rng, [*[torch.int32] * 6, torch.int64])
    lengths = odd((count,), pick(rng, [integer, torch.int32]), rng).fill_(5)
    return {
        "q": odd((count, HEADS, DIM), torch.bfloat16, rng),
        "tables": odd((count, pick(rng, [1, 16, 16, 32])), integer, rng),
        "lengths": lengths,
        "queries": torch.ones(count, dtype=integer),
        "out": odd((count, HEADS, DIM), torch.bfloat16, rng),
    }


def layer_of() -> Any:
    return Pool(FullAttention(heads=2, head_dim=DIM), "LBNHC", "cpu", blocks=4).layer


class Recorded:
    """Launches of calls, and the kinds of their arguments, in place of the launches."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.kinds: list[Any] = []
        self.launched: list[Any] = []
        self.found: dict[Any, Any] = {}
        self.again = 0
        patch.setattr(launch, "batch_kind", partial(self._kind, batch_kind.batch_kind))
        patch.setattr(launch_write, "write_kind", partial(self._kind, launch_write.write_kind))
        patch.setattr(relaunch, "launch", self._launch)

    def _kind(self, real: Any, *given: Any) -> Any:
        self.kinds.append(real(*given))
        return self.kinds[-1]

    def _launch(self, kernel: Any, _: Any, arguments: Any, constants: Any, *more: Any) -> None:
        assert list(constants) == kernel.arg_names[len(arguments) :]
        fixed = tuple(constants.values()), tuple(more[0].items())
        self.launched.append((kernel.__name__, compiled_for(arguments), fixed))

    def look(self) -> None:
        """Calls of a kind launch what was compiled for the same."""
        kind, launched = self.kinds[-1], list(self.launched)
        self.launched.clear()
        self.again += kind in self.found
        assert self.found.setdefault(kind, launched) == launched


def test_batches_of_a_kind_are_compiled_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """And kernels are handed their arguments, then their constants, in their own order."""
    calls, rng, layer = Recorded(monkeypatch), np.random.default_rng(7), layer_of()
    for _ in range(60):
        batch = batch_of(rng)
        attend(layer, batch.pop("q"), **batch)
        assert len(calls.launched) == 4
        calls.look()
    assert calls.again > 5
    assert len(calls.found) > 20


def test_rows_of_a_kind_are_written_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, rng, layer = Recorded(monkeypatch), np.random.default_rng(8), layer_of()
    for _ in range(60):
        count = pick(rng, [1, 5, 16, 17, 32])
        k, v = (odd((count, 2, DIM), torch.bfloat16, rng) for _ in "kv")
        slots = odd((count,), pick(rng, [torch.int64, torch.int64, torch.int32]), rng)
        write(layer, k, v, slots)
        assert len(calls.launched) == 1
        calls.look()
    assert calls.again > 10
    assert len(calls.found) > 10


def test_what_was_compiled_is_launched_with_the_arguments_of_the_call() -> None:
    calls: list[Any] = []

    class Known:
        def __getitem__(self, programs: Any) -> Any:
            return lambda *given: calls.append((programs, given))

    class Kernel:
        __name__ = "decode"

        def __getitem__(self, programs: Any) -> Any:
            def first(*given: Any, **more: Any) -> Any:
                calls.append((programs, given, more))
                return Known()

            return first

    compiled: dict[str, Any] = {}
    for number in (5, 6):
        relaunch.launch(
            Kernel(), (number, 1, 1), (number, 2), {"A": 3, "EARLY": True},
            {"num_warps": 4, "EARLY": True}, compiled,
        )  # fmt: skip
    assert calls == [
        ((5, 1, 1), (5, 2), {"A": 3, "EARLY": True, "num_warps": 4}),
        ((6, 1, 1), (6, 2, 3, True)),
    ]


def test_nothing_is_launched_again_where_triton_asks_for_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """AMD's compiler takes tensors of one kind apart by the bytes of their memory."""
    amd = type(make_backend(GPUTarget("hip", "gfx942", 64)))
    small, large = (torch.empty(n, 8, 128, device="meta") for n in (64, 1 << 20))
    kind = relaunch.kind_of(small)
    assert kind == relaunch.kind_of(large)
    told = [native_specialize_impl(amd, one, False, True, True) for one in (small, large)]
    assert told[0] != told[1]
    for hip, kept in ((None, {"a": {}}), ("6.4", {})):
        monkeypatch.setattr(torch.version, "hip", hip)
        compiled: dict[Any, Any] = {}
        relaunch.keep(compiled, "a", [kind], {})
        assert compiled == kept


def test_a_batch_of_a_kind_that_was_seen_is_refused_like_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its sizes are looked at in each call, and tensors of another kind are another batch."""
    monkeypatch.setattr(relaunch, "launch", lambda *_: None)
    layer, q = layer_of(), torch.zeros(2, HEADS, DIM)
    ones = torch.ones(2, dtype=torch.int32)
    batch = {"tables": torch.zeros(2, 1, dtype=torch.int32), "lengths": ones, "queries": ones}
    attend(layer, q, **batch)
    (made,) = [one for one in layer.kept.values() if isinstance(one, LayerLaunch)]
    assert not made.compiled, "there is nothing to launch again without a GPU"

    class Everything(dict[Any, Any]):
        """Knows every kind whose strides are those of whole rows."""

        def get(self, kind: Any, default: Any = None) -> Any:
            return {} if all(one is None or one[-1][-1] == 1 for one in kind.tensors) else default

    for key, value in layer.kept.items():
        if value is made:
            layer.kept[key] = made._replace(compiled=Everything())
    attend(layer, q, **batch)
    apart = torch.zeros(2, 4, dtype=torch.int32)[:, ::2]
    for wrong in (
        {"tables": batch["tables"][:1]},
        {"queries": ones[:1]},
        {"queries": None},
        {"starts": ones},
        {"tables": apart},
        {"lengths": torch.ones(4, dtype=torch.int32)[::2]},
    ):
        with pytest.raises(AtlasError) as refused:
            attend(layer, q, **{**batch, **wrong})
        assert refused.value.code == Code.BAD_TENSOR, wrong
    other = schedule(split_of(layer, HEADS, dtype=q.dtype), ones[:1], ones[:1])
    with pytest.raises(AtlasError):
        attend(layer, q, prepared=other, **batch)
