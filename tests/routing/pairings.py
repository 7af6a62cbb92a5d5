"""The pairings of a prefill and a decode instance that vLLM 0.32 was measured with.

Each went through the real worker of its NixlConnector, every descriptor was carried out and
every byte compared: 69 arrived right, 34 were refused, and 17 were accepted and arrived
corrupt. A pairing's name is its geometry, at a small size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.models import Model
from kvatlas.specs import (
    FullAttention,
    GatedDeltaNet,
    LatentAttention,
    Mamba2,
    SlidingAttention,
    Spec,
)
from tests.routing.arrives import assert_arrives
from tests.routing.cases import moving, small_plan, stacked

ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


def dense(heads: int = 4, layers: int = 3, **more: Any) -> Model:
    spec = FullAttention(heads=heads, head_dim=16 if more.get("cache") == "nvfp4" else 8, **more)
    return stacked("dense", *[spec] * layers)


def windowed() -> Model:
    full = FullAttention(heads=4, head_dim=8)
    window = SlidingAttention(heads=4, head_dim=8, window=40)
    return stacked("swa", *[window, full] * 2)


def latent() -> Model:
    return stacked("latent", *[LatentAttention(latent=32, rope=8)] * 3)


def hybrid(recurrent: Spec, heads: int = 4) -> Model:
    attention = FullAttention(heads=heads, head_dim=8)
    return stacked("hybrid", *[recurrent, recurrent, attention] * 2)


GDN = GatedDeltaNet(key_heads=4, value_heads=8, key_dim=8, value_dim=8, ssm_dtype="fp32")


def mamba(groups: int) -> Mamba2:
    return Mamba2(heads=8, head_dim=8, groups=groups, state_size=8)


def qwen() -> Model:
    """Qwen3.5-397B's heads and head sizes in two of its sixty layers."""
    recurrent = GatedDeltaNet(
        key_heads=16, value_heads=64, key_dim=128, value_dim=128, ssm_dtype="fp32"
    )
    attention = FullAttention(heads=2, head_dim=256)
    return stacked("qwen", recurrent, attention)


@dataclass(frozen=True)
class Pairing:
    """What its name says: one model, and how each side plans it."""

    name: str
    models: Sequence[Model]
    source: dict[str, Any] = field(default_factory=dict)
    destination: dict[str, Any] = field(default_factory=dict)
    tokens: int = 75
    max_len: int = 96


def sides(tp: tuple[int, int], layout: str | tuple[str, str] | None, **more: Any) -> dict[str, Any]:
    """Options of both sides; a pair names one for each."""
    given = {"tp": tp, "layout": layout, **more}
    both: dict[str, Any] = {"source": {}, "destination": {}}
    for key, value in given.items():
        for place, side in enumerate(("source", "destination")):
            both[side][key] = value[place] if isinstance(value, tuple) else value
    return both


def dense_pairings() -> list[Pairing]:
    plain, found = [dense()], []
    for p, d in ((2, 2), (2, 4), (4, 2)):
        for order in ORDERS:
            name = f"dense P tp{p} -> D tp{d} {order}"
            found.append(Pairing(name, plain, **sides((p, d), order)))
    for one, other in (
        ("LBHNC", "LBNHC"), ("LBNHC", "LBHNC"), ("LBHNC", "BLHNC"), ("BLHNC", "LBHNC"),
        ("BLHNC", "BHLNC"),
    ):  # fmt: skip
        name = f"dense tp2->tp2 layout {one}->{other}"
        found.append(Pairing(name, plain, **sides((2, 2), (one, other))))
    for (p, d), one, other in (
        ((2, 2), "LBHNC", "LBNHC"), ((2, 2), "LBNHC", "LBHNC"), ((2, 4), "LBHNC", "LBNHC"),
    ):  # fmt: skip
        name = f"dense tp{p}->tp{d} {one}->{other} enable_permute_local_kv"
        found.append(Pairing(name, plain, **sides((p, d), (one, other))))
    for (p, d), blocks, order in (
        *[((2, 2), (16, 32), order) for order in ORDERS if order != "LHBNC"],
        ((2, 2), (32, 16), "LBHNC"), ((2, 2), (16, 48), "LBHNC"), ((2, 2), (32, 48), "LBHNC"),
        ((2, 4), (16, 32), "LBHNC"), ((4, 2), (16, 32), "LBHNC"),
    ):  # fmt: skip
        name = f"dense tp{p}->tp{d} block {blocks[0]}->{blocks[1]} {order}"
        found.append(Pairing(name, plain, **sides((p, d), order, block_size=blocks)))
    for order in ("LBHNC", "BLHNC"):
        name = f"dense tp2->tp2 block 16->32 hetero + permute n/a {order}"
        found.append(Pairing(name, plain, **sides((2, 2), order, block_size=(16, 32))))
    for p, d in ((2, 3), (3, 2)):
        name = f"dense P tp{p} -> D tp{d} (6 heads) LBHNC"
        found.append(Pairing(name, [dense(heads=6)], **sides((p, d), "LBHNC")))
    for p, d in ((1, 4), (2, 4), (4, 1), (4, 2), (4, 8), (8, 4)):
        name = f"GQA replication: 2 kv heads P tp{p} -> D tp{d} LBHNC"
        found.append(Pairing(name, [dense(heads=2)], **sides((p, d), "LBHNC")))
    grouped = [dense(cache="nvfp4"), dense(cache="nvfp4", scales="inline")]
    for kind, models in (("nvfp4", grouped), ("kvplanes", [dense(packing="planes")])):
        for p, d in ((2, 2), (1, 2), (2, 1)):
            name = f"packed slots {kind} P tp{p} -> D tp{d} LBHNC"
            found.append(Pairing(name, models, **sides((p, d), "LBHNC")))
    return found


def window_pairings() -> list[Pairing]:
    models = [windowed()]
    found = [
        Pairing(
            "swa    tp2->tp2 LBHNC->LBNHC enable_permute_local_kv",
            models,
            **sides((2, 2), ("LBHNC", "LBNHC")),
        )
    ]
    for p, d in ((2, 2), (2, 4), (4, 2)):
        found.append(Pairing(f"swa   tp{p}->tp{d} LBHNC", models, **sides((p, d), "LBHNC")))
    blocks = sides((2, 2), "LBHNC", block_size=(16, 32))
    found.append(Pairing("swa   tp2->tp2 block 16->32 LBHNC", models, **blocks))
    # LBHNC at tp 2 was measured twice.
    found += [
        Pairing(f"swa   tp2->tp2 {order}", models, **sides((2, 2), order)) for order in ORDERS
    ]
    found.append(Pairing("swa   tp2->tp4 BLHNC", models, **sides((2, 4), "BLHNC")))
    return found


def hybrid_pairings() -> list[Pairing]:
    found = []
    kinds = (
        ("gdn n_groups=0", GDN),
        ("mamba2 n_groups=8", mamba(8)),
        ("mamba2 n_groups=1", mamba(1)),
    )
    for kind, spec in kinds:
        for p, d in ((2, 2), (1, 2), (2, 1), (2, 4), (4, 2)):
            for apc in (True, False):
                name = f"hybrid {kind} P tp{p} -> D tp{d} LBHNC apc={apc}"
                how = sides((p, d), "LBHNC", prefix_caching=apc)
                found.append(Pairing(name, [hybrid(spec)], **how))
    for order in ("LBNHC", "BLHNC", "BHLNC"):
        name = f"hybrid gdn P tp2 -> D tp2 {order}"
        found.append(Pairing(name, [hybrid(GDN)], **sides((2, 2), order)))
        how = sides((2, 4), order, prefix_caching=False)
        name = f"hybrid gdn P tp2 -> D tp4 {order} apc=False"
        found.append(Pairing(name, [hybrid(GDN)], **how))
    how = sides((2, 2), ("LBHNC", "BLHNC"))
    found.append(Pairing("hybrid gdn tp2->tp2 LBHNC->BLHNC", [hybrid(GDN)], **how))
    for p, d in ((2, 4), (4, 2)):
        name = f"hybrid gdn 2 kv heads P tp{p} -> D tp{d} LBHNC apc=False"
        how = sides((p, d), "LBHNC", prefix_caching=False)
        found.append(Pairing(name, [hybrid(GDN, heads=2)], **how))
    for p, d in ((1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (2, 8), (4, 8), (8, 4), (8, 2)):
        name = f"Qwen3.5-397B geometry (FLASH_ATTN) P tp{p} -> D tp{d}"
        how = sides((p, d), None, backend="FLASH_ATTN")
        found.append(Pairing(name, [qwen()], **how, tokens=2200, max_len=2304))
    return found


def latent_pairings() -> list[Pairing]:
    models = [latent()]
    found = [
        Pairing(f"MLA P tp{p} -> D tp{d}", models, **sides((p, d), "LBNHC"))
        for p, d in ((1, 1), (1, 2), (2, 1), (2, 4))
    ]
    orders = sides((1, 1), ("LBNHC", "BLHNC"))
    found.append(Pairing("MLA tp1->tp1 LBNHC->BLHNC", models, **orders))
    for blocks, order in (((16, 32), ""), ((16, 32), " BLHNC"), ((32, 16), "")):
        name = f"MLA tp1->tp1 block {blocks[0]}->{blocks[1]}{order}"
        how = sides((1, 1), order.strip() or "LBNHC", block_size=blocks)
        found.append(Pairing(name, models, **how))
    return found


PAIRINGS = [*dense_pairings(), *window_pairings(), *hybrid_pairings(), *latent_pairings()]

REFUSED = frozenset(
    (
        "GQA replication: 2 kv heads P tp4 -> D tp1 LBHNC",
        "GQA replication: 2 kv heads P tp4 -> D tp2 LBHNC",
        "GQA replication: 2 kv heads P tp8 -> D tp4 LBHNC",
        "MLA tp1->tp1 block 32->16",
        "Qwen3.5-397B geometry (FLASH_ATTN) P tp2 -> D tp4",
        "Qwen3.5-397B geometry (FLASH_ATTN) P tp2 -> D tp8",
        "Qwen3.5-397B geometry (FLASH_ATTN) P tp4 -> D tp2",
        "Qwen3.5-397B geometry (FLASH_ATTN) P tp4 -> D tp8",
        "Qwen3.5-397B geometry (FLASH_ATTN) P tp8 -> D tp2",
        "dense P tp2 -> D tp3 (6 heads) LBHNC",
        "dense P tp2 -> D tp4 BHLNC",
        "dense P tp2 -> D tp4 BLNHC",
        "dense P tp2 -> D tp4 LBNHC",
        "dense P tp2 -> D tp4 LHBNC",
        "dense P tp3 -> D tp2 (6 heads) LBHNC",
        "dense P tp4 -> D tp2 BHLNC",
        "dense P tp4 -> D tp2 BLNHC",
        "dense P tp4 -> D tp2 LBNHC",
        "dense P tp4 -> D tp2 LHBNC",
        "dense tp2->tp2 LBNHC->LBHNC enable_permute_local_kv",
        "dense tp2->tp2 block 32->16 LBHNC",
        "dense tp2->tp2 block 32->48 LBHNC",
        "dense tp2->tp2 layout BLHNC->BHLNC",
        "dense tp2->tp2 layout BLHNC->LBHNC",
        "dense tp2->tp2 layout LBHNC->BLHNC",
        "dense tp2->tp2 layout LBHNC->LBNHC",
        "dense tp2->tp2 layout LBNHC->LBHNC",
        "dense tp4->tp2 block 16->32 LBHNC",
        "hybrid gdn 2 kv heads P tp2 -> D tp4 LBHNC apc=False",
        "hybrid gdn 2 kv heads P tp4 -> D tp2 LBHNC apc=False",
        "hybrid gdn P tp2 -> D tp4 BHLNC apc=False",
        "hybrid gdn P tp2 -> D tp4 LBNHC apc=False",
        "hybrid gdn tp2->tp2 LBHNC->BLHNC",
        "swa    tp2->tp2 LBHNC->LBNHC enable_permute_local_kv",
    )
)
"""What vLLM's connector refuses."""

CORRUPT = frozenset(
    (
        "dense tp2->tp2 block 16->32 BHLNC",
        "dense tp2->tp2 block 16->32 BLNHC",
        "hybrid gdn P tp2 -> D tp2 BHLNC",
        "hybrid gdn P tp2 -> D tp2 BLHNC",
        "hybrid gdn P tp2 -> D tp4 BLHNC apc=False",
        "hybrid mamba2 n_groups=1 P tp1 -> D tp2 LBHNC apc=False",
        "hybrid mamba2 n_groups=1 P tp1 -> D tp2 LBHNC apc=True",
        "hybrid mamba2 n_groups=1 P tp2 -> D tp1 LBHNC apc=False",
        "hybrid mamba2 n_groups=1 P tp2 -> D tp1 LBHNC apc=True",
        "hybrid mamba2 n_groups=1 P tp2 -> D tp4 LBHNC apc=False",
        "hybrid mamba2 n_groups=1 P tp2 -> D tp4 LBHNC apc=True",
        "hybrid mamba2 n_groups=1 P tp4 -> D tp2 LBHNC apc=False",
        "hybrid mamba2 n_groups=1 P tp4 -> D tp2 LBHNC apc=True",
        "packed slots kvplanes P tp1 -> D tp2 LBHNC",
        "packed slots kvplanes P tp2 -> D tp1 LBHNC",
        "packed slots nvfp4 P tp1 -> D tp2 LBHNC",
        "packed slots nvfp4 P tp2 -> D tp1 LBHNC",
    )
)
"""What it accepts, and gets wrong."""


def vllm_verdict(name: str) -> str:
    """What vLLM's own connector makes of a pairing."""
    return "refused" if name in REFUSED else "corrupt" if name in CORRUPT else "right"


def move_pairing(pairing: Pairing) -> None:
    """Move real bytes, planned as vLLM plans them where it does, and compare every one.

    But for the large ones, also as policy atlas plans them.
    """
    large = pairing.max_len > 1000
    for model in pairing.models:
        for policy in ("vllm",) if large else ("vllm", "atlas"):
            try:
                src, dst = (
                    small_plan(model, policy=policy, max_len=pairing.max_len, **how)
                    for how in (pairing.source, pairing.destination)
                )
            except AtlasError as refusal:
                # vLLM has no such plan for a hybrid in a head-major order; atlas has all.
                assert policy == "vllm"
                assert refusal.code is Code.LAYOUT_REFUSED
                continue
            assert_arrives(moving(src, dst, pairing.tokens), spell_out=not large)
