"""Small models to plan: every kind of group, few bytes."""

from __future__ import annotations

from kvatlas.models import Layer, Model
from kvatlas.specs import (
    FullAttention,
    GatedDeltaNet,
    LatentAttention,
    Mamba2,
    ShortConv,
    SlidingAttention,
    Spec,
    compressed_latent,
    sparse_latent,
)


def model_of(name: str, *layers: dict[str, Spec], heads: int = 8) -> Model:
    """A model whose decoder layers keep these caches."""
    found = [
        Layer(name=f"layers.{index}.{part}", index=index, spec=spec)  # type: ignore[arg-type]
        for index, caches in enumerate(layers)
        for part, spec in caches.items()
    ]
    return Model(
        name=name,
        architecture="Small",
        layers=tuple(found),
        depth=len(layers),
        attention_heads=heads,
        max_len=512,
    )


ATTENTION: dict[str, Spec] = {"attn": FullAttention(heads=4, head_dim=8)}
SLIDING: dict[str, Spec] = {"attn": SlidingAttention(heads=4, head_dim=8, window=40)}
WIDE: dict[str, Spec] = {"attn": SlidingAttention(heads=4, head_dim=16, window=40)}
DELTA: dict[str, Spec] = {
    "linear": GatedDeltaNet(key_heads=4, value_heads=8, key_dim=8, value_dim=8, ssm_dtype="fp32")
}
MAMBA: dict[str, Spec] = {"mixer": Mamba2(heads=8, head_dim=8, groups=1, state_size=16)}
LARGE: dict[str, Spec] = {
    "linear": GatedDeltaNet(key_heads=4, value_heads=8, key_dim=12, value_dim=16, ssm_dtype="fp32")
}
CONV: dict[str, Spec] = {"conv": ShortConv(width=32)}
LATENT: dict[str, Spec] = {"attn": LatentAttention(latent=64, rope=16)}

SMALL: dict[str, Model] = {
    "dense": model_of("dense", *[ATTENTION] * 4),
    "sliding": model_of("sliding", *[SLIDING, ATTENTION] * 3),
    "unlike pages": model_of("unlike pages", *[WIDE, ATTENTION, WIDE] * 2),
    "delta hybrid": model_of("delta hybrid", *[DELTA, DELTA, DELTA, ATTENTION] * 3),
    "mamba hybrid": model_of("mamba hybrid", *[MAMBA, MAMBA, ATTENTION] * 2, MAMBA),
    "parallel": model_of("parallel", *[{**MAMBA, **ATTENTION}] * 3),
    "conv hybrid": model_of("conv hybrid", *[CONV, ATTENTION] * 2, CONV),
    "latent": model_of("latent", *[LATENT] * 3),
    "latent hybrid": model_of("latent hybrid", *[DELTA, DELTA, LATENT] * 2),
    "sparse": model_of("sparse", *[sparse_latent()] * 3),
    "compressed": model_of(
        "compressed",
        compressed_latent(0),
        *[compressed_latent(4), compressed_latent(128)] * 2,
    ),
    "cut hybrid": model_of("cut hybrid", *[LARGE] * 3, *[ATTENTION] * 2),
    "recurrent": model_of("recurrent", *[MAMBA] * 3),
}
