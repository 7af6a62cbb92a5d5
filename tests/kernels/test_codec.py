"""What a cache dtype keeps of K and V: exact where it can be, within its bound where not."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvatlas import AtlasError, Code, DType
from kvatlas.kernels import bit_packing as bits
from kvatlas.kernels import decode, encode, hadamard
from kvatlas.specs import ATTENTION_CACHES, FullAttention

D = 128
CACHES = [cache for cache in ATTENTION_CACHES if cache != "auto"]
TURBO = [cache for cache in CACHES if cache.startswith("turboquant")]
SCALED = [cache for cache in CACHES if cache.endswith("_per_token_head")]
SIGNS = hadamard.signs(128, torch.device("cpu"))
DOCS = Path(__file__).parents[2] / "docs/explanation/caches.md"


def spec_of(cache: str, dim: int = D) -> FullAttention:
    return FullAttention(heads=8, head_dim=dim, cache=cache)


def rows(seed: int, *shape: int, dim: int = D, outliers: bool = True) -> Any:
    """Rows as models make them: normal, with a few channels that are much larger."""
    drawn = torch.randn(*shape, dim, generator=torch.Generator().manual_seed(seed))
    if outliers:
        drawn[..., 7] *= 12
        drawn[..., dim // 2 + 16] *= 6
    return drawn


def there_and_back(cache: str, side: Any, values: Any, scale: float = 1.0) -> Any:
    spec = spec_of(cache, values.shape[-1])
    return decode(spec, side, encode(spec, side, values, scale=scale), scale=scale)


@pytest.mark.parametrize("cache", ATTENTION_CACHES)
def test_fields_have_the_bytes_of_the_page_table(cache: str) -> None:
    for dim in (64, 128, 256):
        spec = spec_of(cache, dim)
        page = spec.page(16)
        given = rows(0, 5, 8, dim=dim)
        stored = {**encode(spec, "k", given), **encode(spec, "v", given)}
        assert list(stored) == [field.name for field in page.fields if not field.padding]
        for name, tensor in stored.items():
            field = page.field(name)
            row = next(axis.size for axis in field.axes if axis.name == "C")
            assert tuple(tensor.shape) == (5, 8, row)
            assert tensor.element_size() == field.dtype.item
        nbytes = sum(t.shape[-1] * t.element_size() for t in stored.values())
        pads = sum(field.nbytes // (8 * 16) for field in page.fields if field.padding)
        assert nbytes + pads == page.content * page.heads // 8


def documented() -> dict[tuple[str, str], tuple[float, float]]:
    """The table of errors in the docs: (cache, side) to bounds without and with outliers."""
    line = re.compile(r"^\| `(\w+)` \| ([KV, ]+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)
    return {
        (name, side): (float(plain), float(wild))
        for name, sides, plain, wild in line.findall(DOCS.read_text())
        for side in sides.lower().split(", ")
    }


@pytest.mark.parametrize("cache", CACHES)
def test_errors_are_within_the_documented_bound(cache: str) -> None:
    """The largest relative error of a row of 8 heads, in the 2-norm."""
    scale = 0.2 if cache in ("fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4") else 1.0
    for side, dim, outliers in product("kv", (64, 128, 256), (False, True)):
        bound = documented()[cache, side][outliers]
        values = rows(3, 128, 8, dim=dim, outliers=outliers)
        error = there_and_back(cache, side, values, scale) - values
        worst = (error.norm(dim=-1) / values.norm(dim=-1)).max().item()
        assert worst < bound, (side, dim, outliers, worst)
        assert worst > bound / 2.5, ("a bound that says little", side, dim, outliers, worst)


def test_elementwise_bounds() -> None:
    values = rows(4, 64, 8)
    largest = values.abs().amax(-1, keepdim=True)
    error = (there_and_back("int8_per_token_head", "k", values) - values).abs()
    assert (error <= largest / 254 * 1.001).all()
    error = (there_and_back("fp8_per_token_head", "k", values) - values).abs()
    assert (error <= values.abs() / 16 + largest / 448 / 1024).all()
    rotated = hadamard.rotate_signed(values)
    span = rotated.amax(-1, keepdim=True).clamp(min=0) - rotated.amin(-1, keepdim=True).clamp(max=0)
    again = hadamard.rotate_signed(there_and_back("int4_per_token_head", "k", values))
    error = (again - rotated).abs()
    assert (error <= span / 15 * 1.001).all()
    blocks = values.view(64, 8, 8, 16).abs().amax(-1, keepdim=True).expand(64, 8, 8, 16).flatten(-2)
    error = (there_and_back("nvfp4", "k", values, 0.1) - values).abs()
    assert (error <= blocks / 4).all()


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_int4_is_exact_on_what_it_can_represent(dim: int) -> None:
    """Rows whose rotation lies on a grid of 16 come back exactly, and store the same bytes."""
    spec = spec_of("int4_per_token_head", dim)
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 16, (32, 8, dim), generator=generator)
    codes[..., 0], codes[..., 1] = 0, 15
    zero = torch.randint(0, 16, (32, 8, 1), generator=generator)
    values = hadamard.rotate_signed_back((codes - zero) * 0.25)
    stored = encode(spec, "k", values)
    assert torch.equal(bits.unpack(stored["k"], 4, dim), codes)
    assert torch.equal(decode(spec, "k", stored), values)


def test_nvfp4_is_exact_on_what_it_can_represent() -> None:
    levels = torch.tensor([DType.of("e2m1").decode(code) for code in range(16)])
    generator = torch.Generator().manual_seed(7)
    codes = torch.randint(0, 16, (32, 8, D), generator=generator)
    codes[..., ::16] = 7  # each block holds its largest, 6
    steps = 2.0 ** torch.randint(-3, 4, (32, 8, D // 16), generator=generator)
    values = (levels[codes].view(32, 8, 8, 16) * steps.unsqueeze(-1)).flatten(-2)
    assert torch.equal(there_and_back("nvfp4", "k", values), values)


def test_the_rotation_of_int4_never_changes() -> None:
    """Signs and transform are those of vLLM's caches, written down; blocks of 32 in a row of 96."""
    signs = hadamard.rotate_signed_back(torch.eye(128)[0] * 128)  # a row of H is all ones
    text = "".join("+" if sign > 0 else "-" for sign in signs[:64].tolist())
    assert text == "+-++----+--++-+-++--+++-+-+--++-+---++-++-+-++---------+-------+"
    assert set(signs.abs().tolist()) == {1.0}
    rows = torch.randn(5, 96)
    parts = [hadamard.rotate_signed(part.contiguous()) for part in rows.split(32, dim=-1)]
    assert torch.equal(hadamard.rotate_signed(rows), torch.cat(parts, dim=-1))


@pytest.mark.parametrize("default", [torch.float64, torch.float16])
def test_no_default_dtype_changes_what_is_stored(default: Any) -> None:
    values = rows(9, 4, 8)
    sides = [(cache, side) for cache in ATTENTION_CACHES for side in ("k", "v")]
    before = [there_and_back(cache, side, values) for cache, side in sides]
    usual = torch.get_default_dtype()
    hadamard.signs.cache_clear()
    torch.set_default_dtype(default)
    try:
        for usually, (cache, side) in zip(before, sides, strict=True):
            assert torch.equal(there_and_back(cache, side, values), usually), (cache, side)
        assert torch.equal(hadamard.signs(128, values.device), SIGNS)
    finally:
        torch.set_default_dtype(usual)
        hadamard.signs.cache_clear()


@pytest.mark.parametrize("cache", CACHES)
def test_rows_of_zeros_stay_zero(cache: str) -> None:
    assert not there_and_back(cache, "k", torch.zeros(3, 8, D)).any()
    assert there_and_back(cache, "v", torch.zeros(3, 8, D)).abs().max() < 1e-6


@pytest.mark.parametrize("cache", CACHES)
def test_what_is_not_finite_is_never_a_wrong_number(cache: str) -> None:
    """One scale for the tensor saturates; any other turns what shares it into NaN."""
    for side, bad in product("kv", (float("nan"), float("inf"), -float("inf"))):
        check_not_finite(cache, side, bad)


def check_not_finite(cache: str, side: str, bad: float) -> None:
    values = rows(9, 4, 8)
    values[1, 2, 40] = bad
    got = there_and_back(cache, side, values)
    good = there_and_back(cache, side, rows(9, 4, 8))
    others = torch.ones(4, 8, dtype=torch.bool)
    others[1, 2] = False
    assert torch.equal(got[others], good[others])
    plain = cache in ("fp8", "fp8_e4m3", "fp8_e5m2") or (cache, side) == ("turboquant_k8v4", "k")
    if plain:
        top = 57344.0 if cache == "fp8_e5m2" else 448.0
        kept = got[1, 2, 40]
        assert kept.isnan() if bad != bad else kept == (top if bad > 0 else -top)
        kept_rows = torch.arange(D) != 40
        assert torch.equal(got[1, 2, kept_rows], good[1, 2, kept_rows])
    elif cache == "nvfp4":
        assert got[1, 2, 32:48].isnan().all()
        assert not got[1, 2, :32].isnan().any()
    else:
        assert got[1, 2].isnan().all()


@pytest.mark.parametrize("cache", CACHES)
def test_tiny_rows_stay_tiny(cache: str) -> None:
    for side, size in product("kv", (1e-44, 1e-30, 1e-10)):
        got = there_and_back(cache, side, torch.full((2, 8, D), size))
        assert got.isfinite().all()
        assert got.abs().max() < (2e-6 if cache in SCALED else 1e-5), (side, size)


@pytest.mark.parametrize("cache", CACHES)
def test_one_huge_outlier_does_not_break_a_row(cache: str) -> None:
    """The outlier comes back as large as the type can hold it, and the rest stays finite."""
    for side, channel in product("kv", (0, 1, 77)):
        values = rows(10, 2, 8, outliers=False)
        values[..., channel] = 30_000.0
        got = there_and_back(cache, side, values)
        assert got.isfinite().all()
        held = {"nvfp4": 448.0 * 6, "fp8": 448.0, "fp8_e4m3": 448.0}.get(cache, 30_000.0)
        if (cache, side) == ("turboquant_k8v4", "k"):
            held = 448.0
        error = (got[..., channel] - held).abs() / held
        assert error.max() < 0.15, (side, channel, error.max())


def test_rows_on_one_side_of_zero_keep_zero_in_their_range() -> None:
    """Channel 0 alone rotates to a constant, which has no range of its own."""
    values = torch.zeros(1, 8, D)
    values[..., 0] = 5.0
    assert torch.allclose(there_and_back("int4_per_token_head", "k", values), values, atol=1e-4)


@pytest.mark.parametrize("width", [3, 4])
def test_packed_codes_come_back(width: int) -> None:
    for count in (1, 7, 8, 96, 128):
        codes = torch.randint(0, 1 << width, (5, count))
        packed = bits.pack(codes, width)
        assert packed.shape[-1] == DType.of(f"uint{width}").storage(count)
        assert torch.equal(bits.unpack(packed, width, count), codes)


def test_e2m1_is_what_the_dtype_says() -> None:
    dtype = DType.of("e2m1")
    values = torch.linspace(-7, 7, 2801, dtype=torch.float64)
    ours = [dtype.decode(dtype.encode(value)) for value in values.tolist()]
    theirs = bits.from_e2m1(bits.to_e2m1(values), torch.float64)
    assert theirs.tolist() == ours


def test_rows_of_another_size_are_refused() -> None:
    for spec, values in (
        (spec_of("fp8"), torch.zeros(2, 8, 64)),
        (FullAttention(heads=4, head_dim=96, cache="turboquant_4bit_nc"), torch.zeros(2, 4, 96)),
    ):
        with pytest.raises(AtlasError) as refusal:
            encode(spec, "k", values)
        assert refusal.value.code is Code.BAD_TENSOR
