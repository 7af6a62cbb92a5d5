"""What a cache dtype keeps of K and V: exact where it can be, within its bound where not."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvatlas import AtlasError, Code, DType  # noqa: E402
from kvatlas.kernels import bits, decode, encode  # noqa: E402
from kvatlas.specs import ATTENTION_CACHES, FullAttention  # noqa: E402

D = 128
CACHES = [cache for cache in ATTENTION_CACHES if cache != "auto"]


def spec_of(cache: str) -> FullAttention:
    return FullAttention(heads=4, head_dim=D, cache=cache)


def rows(seed: int, *shape: int) -> Any:
    """Rows as models make them: normal, with a few channels that are much larger."""
    found = torch.randn(*shape, D, generator=torch.Generator().manual_seed(seed))
    found[..., 7] *= 12
    found[..., 80] *= 6
    return found


def there_and_back(cache: str, side: Any, values: Any, scale: float = 1.0) -> Any:
    spec = spec_of(cache)
    return decode(spec, side, encode(spec, side, values, scale=scale), scale=scale)


@pytest.mark.parametrize("cache", ATTENTION_CACHES)
def test_fields_have_the_bytes_of_the_page_table(cache: str) -> None:
    spec = spec_of(cache)
    page = spec.page(16)
    found = {**encode(spec, "k", rows(0, 5, 4)), **encode(spec, "v", rows(1, 5, 4))}
    assert list(found) == [field.name for field in page.fields if not field.padding]
    for name, tensor in found.items():
        field = page.field(name)
        row = next(axis.size for axis in field.axes if axis.name == "C")
        assert tuple(tensor.shape) == (5, 4, row)
        assert tensor.element_size() == field.dtype.item
    nbytes = sum(t.shape[-1] * t.element_size() for t in found.values())
    pads = sum(field.nbytes // (4 * 16) for field in page.fields if field.padding)
    assert nbytes + pads == page.content * page.heads // 4


# Largest relative error of a row in the 2-norm, on rows with outliers.
BOUNDS = {
    "fp8": 1 / 16, "fp8_e4m3": 1 / 16, "fp8_e5m2": 1 / 8, "int8_per_token_head": 0.03,
    "fp8_per_token_head": 1 / 16, "int4_per_token_head": 0.55, "nvfp4": 0.2,
}  # fmt: skip
TURBO = {
    "turboquant_k8v4": (1 / 16, 0.55), "turboquant_4bit_nc": (0.14, 0.55),
    "turboquant_k3v4_nc": (0.27, 0.55), "turboquant_3bit_nc": (0.27, 0.99),
}  # fmt: skip


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("side", ["k", "v"])
def test_errors_are_within_their_bound(cache: str, side: Any) -> None:
    values = rows(3, 64, 4)
    scale = 0.2 if cache in ("fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4") else 1.0
    error = there_and_back(cache, side, values, scale) - values
    worst = (error.norm(dim=-1) / values.norm(dim=-1)).max().item()
    bound = TURBO[cache][side == "v"] if cache in TURBO else BOUNDS[cache]
    assert worst < bound
    assert worst > bound / 8, "a bound that says nothing"


def test_elementwise_bounds() -> None:
    values = rows(4, 64, 4)
    largest = values.abs().amax(-1, keepdim=True)
    assert (
        (there_and_back("int8_per_token_head", "k", values) - values).abs() <= largest / 254 * 1.001
    ).all()
    error = (there_and_back("fp8_per_token_head", "k", values) - values).abs()
    assert (error <= values.abs() / 16 + largest / 448 / 512).all()
    span = values.amax(-1, keepdim=True).clamp(min=0) - values.amin(-1, keepdim=True).clamp(max=0)
    error = (there_and_back("int4_per_token_head", "k", values) - values).abs()
    assert (error <= span / 30 * 2.01).all()
    blocks = values.view(64, 4, 8, 16).abs().amax(-1, keepdim=True).expand(64, 4, 8, 16).flatten(-2)
    error = (there_and_back("nvfp4", "k", values, 0.1) - values).abs()
    assert (error <= blocks / 4).all()


def test_int4_and_nvfp4_are_exact_on_what_they_can_represent() -> None:
    codes = torch.randint(0, 16, (32, 4, D), generator=torch.Generator().manual_seed(5))
    codes[..., 0], codes[..., 1] = 0, 15
    zero = torch.randint(0, 16, (32, 4, 1), generator=torch.Generator().manual_seed(6))
    values = (codes - zero) * 0.25
    assert torch.equal(there_and_back("int4_per_token_head", "k", values), values.float())
    levels = torch.tensor([DType.of("e2m1").decode(code) for code in range(16)])
    codes = torch.randint(0, 16, (32, 4, D), generator=torch.Generator().manual_seed(7))
    codes[..., ::16] = 7  # each block holds its largest, 6
    steps = 2.0 ** torch.randint(
        -3, 4, (32, 4, D // 16), generator=torch.Generator().manual_seed(8)
    )
    values = (levels[codes].view(32, 4, 8, 16) * steps.unsqueeze(-1)).flatten(-2)
    assert torch.equal(there_and_back("nvfp4", "k", values), values)


@pytest.mark.parametrize("cache", CACHES)
def test_rows_of_zeros_stay_zero(cache: str) -> None:
    assert not there_and_back(cache, "k", torch.zeros(3, 4, D)).any()
    assert there_and_back(cache, "v", torch.zeros(3, 4, D)).abs().max() < 1e-6


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
    found = bits.from_e2m1(bits.to_e2m1(values), torch.float64)
    assert found.tolist() == ours


def test_rows_of_another_size_are_refused() -> None:
    for spec, values in (
        (spec_of("fp8"), torch.zeros(2, 4, 64)),
        (FullAttention(heads=4, head_dim=96, cache="turboquant_4bit_nc"), torch.zeros(2, 4, 96)),
    ):
        with pytest.raises(AtlasError) as refusal:
            encode(spec, "k", values)
        assert refusal.value.code is Code.BAD_TENSOR
