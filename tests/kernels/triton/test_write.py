"""Writing in Triton's interpreter: rows that are no numbers, rows far apart, latents."""

from __future__ import annotations

import mmap
import sys
from importlib import import_module
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from triton.language import constexpr

from kvatlas import kernels
from kvatlas.kernels import bit_packing, hadamard
from kvatlas.kernels import triton as gpu
from kvatlas.kernels.quantise import normal_levels, round_away
from kvatlas.kernels.triton import hadamard as rotations
from kvatlas.kernels.triton.quantise_device import away, level_codes, to_e2m1
from kvatlas.specs import ATTENTION_CACHES, FullAttention, LatentAttention
from tests.kernels.triton.cases import (
    Pool,
    check_not_finite,
    check_write_latent,
)


def _round(values: Any, codes: Any, whole: Any) -> None:
    at = tl.arange(0, 256)
    value = tl.load(values + at)
    tl.store(codes + at, to_e2m1(value, tl.full([256], 1.0, tl.float32), False))
    tl.store(whole + at, away(value))


def test_bits_round_as_torch_does() -> None:
    """Ties, and the numbers next to them: to e2m1, and to whole numbers away from zero."""
    ties = torch.arange(0, 8, 0.25)
    near = [torch.nextafter(ties, torch.tensor(far)) for far in (-9.0, 9.0)]
    values = torch.cat([ties, *near, torch.linspace(0, 130, 32)])
    values = torch.cat([values, -values])
    codes, whole = (torch.empty(len(values), dtype=torch.int32) for _ in "ab")
    triton.jit(_round)[(1,)](values, codes, whole)
    assert codes.tolist() == bit_packing.to_e2m1(values).tolist()
    assert whole.tolist() == round_away(values).tolist()


def _levels(values: Any, codes: Any, bits: constexpr) -> None:
    at = tl.arange(0, 1024)
    tl.store(codes + at, level_codes(tl.load(values + at), bits))


def test_levels_are_found_by_a_polynomial() -> None:
    """Beside the ends of their cells, far outside of them, and between."""
    for bits in (3, 4):
        levels = torch.tensor(normal_levels(bits))
        ends = (levels[1:] + levels[:-1]) / 2
        beside = torch.cat([ends * (1 + 3e-6), ends * (1 - 3e-6), torch.tensor([0.0, -30.0, 30.0])])
        values = torch.linspace(-4, 4, 1024)
        values[: len(beside)] = beside
        codes = torch.empty(1024, dtype=torch.int32)
        triton.jit(_levels)[(1,)](values, codes, bits=bits)
        assert codes.tolist() == torch.bucketize(values, ends).tolist()


@pytest.mark.parametrize("cache", ATTENTION_CACHES)
def test_what_is_not_finite_stays_so(cache: str) -> None:
    check_not_finite(FullAttention(heads=2, head_dim=32, cache=cache), "cpu")


def test_one_block_of_a_turned_row_spoils_all_of_it() -> None:
    spec = FullAttention(heads=2, head_dim=48, v_dim=16, cache="int4_per_token_head")
    check_not_finite(spec, "cpu")


@pytest.fixture
def far() -> Any:
    """Rows whose heads are 2**30 elements apart, with as much before them as behind.

    Memory is mapped for all of that, and there for what is touched alone.
    """
    if sys.platform != "linux":
        pytest.skip("memory is mapped as Linux does")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        memory = mmap.mmap(-1, (2**32 + 2**12) * 2, flags=flags)
    except OSError:
        pytest.skip("no address space of 8 GiB")
    whole = torch.frombuffer(memory, dtype=torch.float16)
    rows = whole.as_strided((4, 3, 16), (16, 2**30, 1), 2**31)
    rows.copy_(torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(1)))
    return rows


def test_heads_may_be_far_apart(far: Any) -> None:
    spec = FullAttention(heads=3, head_dim=16, dtype="fp16")
    layer, slots = Pool(spec, "LBNHC", "cpu").layer, torch.tensor([5, 40, 9, 77])
    gpu.write(layer, far, far, slots)
    for rows in kernels.read(layer, slots):
        assert torch.equal(rows.half(), far)
    turned = hadamard.rotate_signed(rows)
    assert torch.allclose(rotations.rotate_queries(far, 1.0).float(), turned, atol=0.02)
    far.copy_(turned)
    rotations.rotate_back(far, torch.tensor([0, len(far)]))
    assert torch.allclose(far.float(), rows, atol=0.02)


def test_heads_of_queries_may_be_far_apart(far: Any) -> None:
    spec = FullAttention(heads=3, head_dim=16, dtype="fp16")
    layer, slots = Pool(spec, "LBNHC", "cpu").layer, torch.tensor([16, 17, 18, 19])
    rows, near = far.clone(), far.contiguous()
    kernels.write(layer, rows, rows, slots)
    where: dict[str, Any] = {"tables": torch.ones(2, 1, dtype=torch.int32)}
    where |= {"lengths": torch.tensor([4, 3]), "queries": torch.tensor([1, 3])}
    expected = gpu.attend(layer, near, tile=16, **where)
    assert torch.equal(gpu.attend(layer, far, tile=16, **where), expected)
    gpu.attend(layer, near, tile=16, out=far, **where)
    assert torch.equal(far, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", [{"dtype": "fp32"}, {"dtype": "bf16"}, {"cache": "fp8"}])
def test_latents_are_written(form: dict[str, str], dtype: Any) -> None:
    spec = LatentAttention(latent=48, rope=16, **form)  # type: ignore[arg-type]
    check_write_latent(spec, "BLNHC", "cpu", dtype=dtype, whole=True)


LATENTS: list[tuple[dict[str, Any], list[str]]] = [
    ({}, ["write_latent", "attend_latent"]),
    ({"cache": "fp8"}, ["write_latent", "attend_latent"]),
    ({"latent": 448}, ["write_latent"]),
    ({"cache": "fp8_ds_mla"}, ["attend_latent"]),
    ({"cache": "nvfp4_ds_mla"}, []),
    ({"cache": "fp8_ds_mla", "version": "v4", "latent": 448}, []),
]


@pytest.mark.parametrize(("form", "names"), LATENTS)
def test_latents_find_a_kernel_where_there_is_one(
    form: dict[str, Any], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: what no kernel is written for is left to torch."""
    called = []
    for name in ("write_latent", "attend_latent"):
        monkeypatch.setattr(gpu, name, lambda *_, name=name, **__: called.append(name))
    for room in ("write_read_latent", "paged_attention"):
        module = import_module(f"kvatlas.kernels.{room}")
        monkeypatch.setattr(module, "gpu_kernels", lambda *_: gpu)
    spec = LatentAttention(**form)
    layer = Pool(spec, "LBNHC", "cpu", block=64, blocks=2).layer
    layer.tensor.zero_()
    rows, some = torch.ones(1, spec.latent), torch.ones(1, dtype=torch.int64)
    kernels.write_latent(layer, rows, torch.ones(1, 64), some * 64)
    out = kernels.attend_latent(
        layer, torch.ones(1, 2, spec.latent + 64), tables=some[None], lengths=some,
        queries=some, scale=1.0,
    )  # fmt: skip
    assert called == names
    if not names:
        assert torch.allclose(out, torch.ones(1, 2, spec.latent), rtol=0.05)
