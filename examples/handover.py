"""Prefill a prompt in one process, move its cache, and decode in another process.

A tiny hybrid model with random weights runs its prompt in one process and decodes in another one.
The two plans differ in tensor-parallel ranks, layout, block size and pack. The tokens must equal
the tokens of a run in one process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")

import torch
from examples.generate import show_plan, tiny_model
from rich.console import Console
from rich.table import Table

from kvatlas import AtlasError
from kvatlas.engines.transformers import AtlasCache, make_plan
from kvatlas.engines.transformers.simulated_ranks import SimulatedRanks
from kvatlas.planning import Plan
from kvatlas.routing import check, scattered
from kvatlas.wire import Session, make_transport

console = Console(width=112)
PROMPT, NEW = 150, 40
LONGEST = PROMPT + NEW + 1
PREFILL = {"tp": 2, "layout": "LBHNC", "pack": 1}
DECODE = {"tp": 1, "layout": "BHLNC", "pack": 4, "block_size": 32}
MARK = "prefilled "


def prompt() -> torch.Tensor:
    return torch.randint(1, 97, (1, PROMPT), generator=torch.Generator().manual_seed(5))


def plan_for(options: dict[str, object]) -> Plan:
    return make_plan(tiny_model().config, batch=3, max_len=LONGEST, **options)  # type: ignore[arg-type]


def transport_here() -> str:
    """Return NIXL, or shared memory if NIXL is not installed."""
    try:
        make_transport("nixl").close()
    except AtlasError as missing:
        console.print(f"[yellow]NIXL cannot be used here, so shared memory is: {missing.got}[/]")
        return "shm"
    return "nixl"


def prefill(transport: str) -> None:
    """Run the first process: prefill the prompt, offer its cache, serve until stdin ends."""
    model = tiny_model()
    model.set_attn_implementation("kvatlas")
    cache = AtlasCache.from_config(model.config, batch=1, max_len=LONGEST)
    begun = time.perf_counter()
    first = model.generate(prompt(), past_key_values=cache, max_new_tokens=1, do_sample=False)
    taken = time.perf_counter() - begun
    with SimulatedRanks(
        plan_for(PREFILL), transport, name="prefill", model=model, secret=b"shared by both ends"
    ) as ranks:
        blocks = ranks.copy_from(cache, PROMPT)
        for node in ranks.nodes:
            node.offer("request 17", blocks, PROMPT, timeout=300)
        said = {"endpoints": ranks.endpoints, "first": int(first[0, -1]), "seconds": taken}
        print(MARK + json.dumps(said), flush=True)
        sys.stdin.read()


def decode(transport: str, said: dict[str, object]) -> list[int]:
    """Run the second process: fetch the cache into another plan, and decode."""
    model = tiny_model()
    model.set_attn_implementation("kvatlas")
    table = Table(title=f"Request 17 on its way over {transport}", title_justify="left")
    for column in ("to rank", "bytes", "descriptors", "way", "handshake ms", "transfer ms"):
        table.add_column(column, justify="right")
    with SimulatedRanks(
        plan_for(DECODE), transport, name="decode", model=model, secret=b"shared by both ends"
    ) as ranks:
        blocks = scattered(ranks.plan, PROMPT)
        for node in ranks.nodes:
            with Session(node, said["endpoints"]) as session:  # type: ignore[arg-type]
                transfer = session.pull(
                    "request 17", destination_blocks=blocks, tokens=PROMPT, checksums=True
                ).wait(60)
                spent = node.metrics.seconds
                table.add_row(
                    str(node.rank),
                    f"{transfer.moved:,}",
                    f"{node.metrics.values['descriptors']:,}",
                    "staged" if spent["staged"] else "direct",
                    f"{spent['handshake'] * 1e3:.1f}",
                    f"{transfer.seconds * 1e3:.1f}",
                )
        cache = AtlasCache.from_config(model.config, batch=1, max_len=LONGEST, layout="BHLNC")
        ranks.copy_to(cache, blocks, PROMPT)
    console.print(table)
    ids = torch.cat((prompt(), torch.tensor([[said["first"]]])), dim=1)
    tokens = model.generate(ids, past_key_values=cache, max_new_tokens=NEW - 1, do_sample=False)
    return tokens[0, PROMPT:].tolist()  # type: ignore[no-any-return]


def main() -> None:
    ends = plan_for(PREFILL), plan_for(DECODE)
    console.rule("Two plans of one tiny hybrid model")
    for plan in ends:
        show_plan(plan)
    console.print(ends[1].explain())
    answer = check(*ends, tokens=PROMPT)
    price = f"{answer.nbytes:,} bytes in {answer.descriptors:,} descriptors"
    console.print(f"\nCan it move? {answer.ok}: {price}.\n")
    console.rule("Prefill in one process, decode in another")
    transport = transport_here()
    process = subprocess.Popen(  # noqa: S603  # this very script
        [sys.executable, "-m", "examples.handover", "prefill", transport],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None  # noqa: S101
    assert process.stdout is not None  # noqa: S101
    line = next(line for line in process.stdout if line.startswith(MARK))
    said = json.loads(line[len(MARK) :])
    console.print(f"Prefill: {PROMPT} tokens in {said['seconds']:.2f} s, tp 2, LBHNC, pack 1")
    tokens = decode(transport, said)
    process.stdin.close()
    process.wait(20)
    undisturbed = tiny_model().generate(prompt(), max_new_tokens=NEW, do_sample=False)
    same = tokens == undisturbed[0, PROMPT:].tolist()
    console.print(f"Decode:  {' '.join(map(str, tokens))}")
    word = "[bold green]the same[/]" if same else "[bold red]other tokens[/]"
    console.print(f"An undisturbed run says {word}.")
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["prefill"]:
        prefill(sys.argv[2])
    else:
        main()
