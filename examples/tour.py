"""Show pages, slices of memory, errors and plans on one screen. `make tour` runs this file."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvatlas import AtlasError, Layout, validate
from kvatlas.geometry import ENGINE_LAYOUTS
from kvatlas.planning import padding, plan
from kvatlas.specs import (
    FullAttention,
    GatedDeltaNet,
    Indexer,
    LatentAttention,
    Mamba2,
    Spec,
    compressed_latent,
)

console = Console(width=112)
COLOURS = ("red", "green", "blue", "magenta")


def pages() -> None:
    table = Table(title="What one layer keeps for a block", title_justify="left")
    for column in ("layer", "tokens", "H", "N", "C bytes", "page bytes", "tp 8: page", "replicas"):
        table.add_column(column, justify="left" if column == "layer" else "right")
    gqa: dict[str, Any] = {"heads": 8, "head_dim": 128}
    rows: list[tuple[str, Spec, int]] = [
        ("8 heads of 128, bf16", FullAttention(**gqa), 16),
        ("the same, int8 with scales", FullAttention(**gqa, cache="int8_per_token_head"), 16),
        ("the same, nvfp4", FullAttention(**gqa, cache="nvfp4", packing="head_groups"), 16),
        ("2 heads of 256, bf16", FullAttention(heads=2, head_dim=256), 16),
        ("MLA, bf16", LatentAttention(), 64),
        ("MLA, fp8_ds_mla", LatentAttention(cache="fp8_ds_mla"), 64),
        ("indexer, fp8", Indexer(), 64),
        ("DeepSeek-V4, 4 tokens in a state", compressed_latent(4)["attn"], 256),
        (
            "gated delta net, Qwen3.5-397B",
            GatedDeltaNet(
                key_heads=16, value_heads=64, key_dim=128, value_dim=128, ssm_dtype="fp32"
            ),
            16,
        ),
        ("Mamba-2, one group", Mamba2(heads=128, head_dim=64, groups=1, state_size=128), 16),
    ]
    for name, spec, block in rows:
        page = spec.page(block)
        table.add_row(
            name,
            str(block),
            str(page.heads),
            str(page.states),
            f"{page.content:,}",
            f"{page.nbytes:,}",
            f"{spec.page_bytes(block, tp=8):,}",
            str(spec.replicas(8)),
        )
    console.print(table)


def memory() -> None:
    console.print("\n[bold]The same bytes in six orders[/]: two blocks, two layers, two heads.")
    console.print(
        "A colour is a layer, the digit its head, [reverse]reverse[/] the second block.\n"
    )
    page = FullAttention(heads=2, head_dim=2, dtype="e4m3").page(4)
    for layout in ENGINE_LAYOUTS:
        pool = page.place(layout, pages=2, blocks=2)
        cells = {}
        for slot in range(2):
            for block in range(2):
                for head in range(2):
                    for state in range(4):
                        at = pool(L=slot, B=block, H=head, N=state, C=0)
                        style = COLOURS[slot] + (" reverse" if block else "")
                        cells[at] = (str(head), style)
        strip = Text(f"  {layout}  ")
        for at in sorted(cells):
            strip.append(*cells[at])
        half = pool.narrow("H", 0, 1).runs(B=[1])[0]
        whole = pool.runs(B=[1])[0]
        strip.append(f"   one block: {len(whole)} run(s); head 0 of it: {len(half)} run(s)")
        console.print(strip)


def slices() -> None:
    console.print("\n[bold]Descriptors[/] for half the heads of 2,048 scattered blocks, 32 layers:")
    page = FullAttention(heads=8, head_dim=128).page(16)
    table = Table()
    for column in ("order", "descriptors", "bytes in each"):
        table.add_column(column, justify="right")
    ids = [(7 * i) % 20_000 for i in range(2048)]
    for layout in ENGINE_LAYOUTS:
        pool = page.place(layout, pages=32, blocks=20_000)
        rows = pool.narrow("H", 0, 4).descriptors(B=ids)
        table.add_row(str(layout), f"{len(rows):,}", f"{int(rows[0, 1]):,}")
    console.print(table)


def refusals() -> None:
    console.print("\n[bold]What cannot be right is refused[/], with a code and a remedy:\n")
    page = FullAttention(heads=2, head_dim=64).page(16)
    pool = page.place(Layout("BLHNC"), pages=2, blocks=4)

    def overlapping() -> None:
        first = pool.select("L", 0)
        validate({"layer 0": first, "layer 1": first.shift(64)}, size=pool.nbytes)

    attempts = (
        lambda: FullAttention(heads=10, head_dim=128).page(16, tp=4),
        lambda: page.padded(page.nbytes + 512).place(Layout("BHLNC"), pages=2, blocks=4),
        overlapping,
    )
    for attempt in attempts:
        try:
            attempt()
        except AtlasError as refusal:
            console.print(f"  {refusal}", style="yellow", highlight=False, markup=False)


def plans() -> None:
    console.print("\n[bold]A hybrid planned[/]: Kimi-K3 at tp 8, 60 GiB on each rank.")
    table = Table()
    for column in ("policy", "block", "blocks", "padding", "tokens", "requests of 4,096 tokens"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    made = {}
    for policy in ("vllm", "atlas"):
        made[policy] = plan("Kimi-K3", memory="60GiB", tp=8, policy=policy)
        found = made[policy]
        table.add_row(
            policy,
            f"{found.block_size:,}",
            f"{found.num_blocks:,}",
            f"{padding(found).share:.2%}",
            f"{found.tokens:,}",
            f"{found.requests(4096):.0f}",
        )
    console.print(table)
    console.print(made["atlas"].explain(), highlight=False, markup=False)


if __name__ == "__main__":
    plans()
    console.print()
    pages()
    memory()
    slices()
    refusals()
