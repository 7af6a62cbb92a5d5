"""`python -m tests.attack`: every claim against every transport, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tests.attack.plans import installed
from tests.attack.suite import CLAIMS, LABELS, MARK, wire_of
from tests.wire.child import Json

_HIT = 0.5
"""The least share of strikes that must meet a transfer under way."""


def main() -> int:
    """Run what the command line says; not 0 where a claim was not held."""
    options = _options()
    rows: list[Json] = []
    console = Console(stderr=bool(options.json))
    with Live(_table(rows), console=console, refresh_per_second=2) as live:
        for label, claim in _chosen(options):
            rows.append({"claim": claim, "transport": label})
            live.update(_table(rows))
            rows[-1] |= _in_a_process(label, claim, options)
            live.update(_table(rows))
    if options.json:
        print(json.dumps(rows, indent=2))
    return 0 if rows and all(row["ok"] for row in rows) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.add_argument("--tries", type=int, default=6, help="strikes for each claim")
    parser.add_argument("--tokens", type=int, default=2048, help="of a request, 16 KiB each")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--transports", nargs="*", choices=LABELS, default=LABELS)
    parser.add_argument("--claims", nargs="*", default=[""], help="parts of their names")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args()


def _chosen(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    labels = [label for label in options.transports if installed(wire_of(label))]
    for claim, row in CLAIMS.items():
        if any(part in claim for part in options.claims):
            for label in row.over:
                if label in labels:
                    yield label, claim


def _in_a_process(label: str, claim: str, options: argparse.Namespace) -> Json:
    """One claim over one transport, in a process of its own: a crash is an outcome too."""
    numbers = [str(number) for number in (options.tries, options.tokens, options.seed)]
    command = [sys.executable, "-m", "tests.attack.suite", label, claim, *numbers]
    begun = time.monotonic()
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=120 + 30 * options.tries,
            env=os.environ | wire_of(label).settings, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        said, code = ended.stdout, ended.returncode
        words = _reason(ended.stderr)
    except subprocess.TimeoutExpired:
        said, code, words = "", -1, "it hangs"
    found = next((line for line in said.splitlines() if line.startswith(MARK)), None)
    outcome: Json = {"tries": 0, "held": 0, "hits": None, "faults": {}}
    if found:
        outcome = json.loads(found.removeprefix(MARK))
    if not found or code:
        outcome["faults"][f"exit code {code}: {words}"] = 1
    met = outcome["hits"] is None or outcome["hits"] >= _HIT * outcome["tries"]
    held = 0 < outcome["tries"] == outcome["held"] and not outcome["faults"]
    return outcome | {"seconds": time.monotonic() - begun, "ok": held and met}


def _reason(stderr: str) -> str:
    """What a process said last, or how it crashed."""
    lines = stderr.strip().splitlines() or [""]
    return next((line for line in lines if line.startswith("Fatal")), lines[-1])[:200]


def _table(rows: list[Json]) -> Table:
    table = Table(title="Attacks on the wire")
    for name in ("claim", "transport", "tries", "held", "in flight", "seconds", "what was found"):
        table.add_column(name, justify="left" if name in ("claim", "transport") else "right")
    for row in rows:
        if "ok" not in row:
            table.add_row(row["claim"], row["transport"], "...")
            continue
        style = "green" if row["ok"] else "bold red"
        hits = "" if row["hits"] is None else str(row["hits"])
        found = "; ".join(f"{what} ({times})" for what, times in row["faults"].items())
        cells = (str(row["tries"]), f"[{style}]{row['held']}[/]", hits, f"{row['seconds']:.0f}")
        table.add_row(row["claim"], row["transport"], *cells, found or "[green]held[/]")
    return table


if __name__ == "__main__":
    sys.exit(main())
