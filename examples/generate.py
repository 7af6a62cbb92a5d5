"""Generate with a tiny hybrid model on planned pages; compare with transformers' own cache."""

from __future__ import annotations

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from kvatlas.engines.transformers import AtlasCache
from kvatlas.planning import Plan

console = Console(width=112)
PROMPTS = ([3, 14, 15, 92, 65], [2, 71, 82], [16, 18, 3, 39, 88, 7, 49])
NEW = 32
ORDERS = (("LBNHC", 4), ("BLHNC", 2), ("BHLNC", 4))


def tiny_model() -> Qwen3NextForCausalLM:
    """Return a random model with two gated delta net layers and four attention layers."""
    config = Qwen3NextConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        layer_types=["linear_attention", "full_attention", "full_attention"] * 2,
        mlp_only_layers=list(range(6)),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        initializer_range=0.25,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(7)
    return Qwen3NextForCausalLM(config).eval()


def show_plan(plan: Plan) -> None:
    table = Table(title=f"The plan: {plan}", title_justify="left")
    for column in ("group", "kind", "layers", "tokens in a block", "page bytes", "pool"):
        table.add_column(column, justify="left" if column in ("kind", "layers") else "right")
    for region in plan.regions:
        group = plan.groups[region.group]
        names = ", ".join(layer.name.removeprefix("model.layers.") for layer in region.layers)
        numbers = (f"{group.block}", f"{region.page_bytes:,}", f"{group.pool}")
        table.add_row(str(region.group), group.kind, names, *numbers)
    console.print(table)


def main() -> None:
    model = tiny_model()
    longest = max(map(len, PROMPTS))
    rows = [[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS]
    ids = torch.tensor(rows)
    options = {"attention_mask": (ids > 0).long(), "max_new_tokens": NEW, "do_sample": False}
    own = model.generate(ids, **options)[:, longest:]
    model.set_attn_implementation("kvatlas")
    agree = []
    for order, pack in ORDERS:
        cache = AtlasCache.from_config(
            model.config, batch=len(PROMPTS), max_len=longest + NEW, layout=order, pack=pack
        )
        said = model.generate(ids, past_key_values=cache, **options)[:, longest:]
        agree.append(torch.equal(said, own))
    show_plan(cache.plan)
    table = Table(title="A tiny Qwen3-Next, three prompts", title_justify="left")
    table.add_column("tokens on transformers' own cache")
    table.add_column(f"tokens on pages in {order}, pack {pack}")
    for mine, theirs in zip(said.tolist(), own.tolist(), strict=True):
        table.add_row(*(" ".join(map(str, row[:14])) + " ..." for row in (theirs, mine)))
    console.print(table)
    told = ", ".join(f"{order} pack {pack}" for order, pack in ORDERS)
    console.print(f"All {NEW} tokens of each row agree, in {told}: {all(agree)}")
    if not all(agree):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
