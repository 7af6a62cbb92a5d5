"""`python -m tests.attack`: every claim against every transport, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tests.attack.plans import Wire, installed
from tests.attack.suite import CLAIMS, LABELS, MARK, wire_of
from tests.wire.child import Json

_HANGS = -1000
"""The exit code of a process that was killed because it did not end."""
_LOG_LINE = re.compile(r"[IWE]\d{4} ")
"""How lines begin that Mooncake logs."""
_HIT = 0.5
"""The least share of strikes that must meet a transfer under way."""


def main() -> int:
    """Run what the command line says; not 0 where a claim was not held."""
    options = _options()
    rows: list[Json] = []
    console = Console(stderr=bool(options.json))

    def attack(row: Json) -> None:
        rows.append(row)
        row |= _in_processes(row["transport"], row["claim"], options)

    chosen = [{"claim": claim, "transport": label} for label, claim in _chosen(options)]
    with (
        Live(get_renderable=lambda: _table(rows), console=console, refresh_per_second=2),
        ThreadPoolExecutor(options.jobs) as jobs,
    ):
        list(jobs.map(attack, chosen))
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
    parser.add_argument("--jobs", type=int, default=1, help="claims that are tried concurrently")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args()


def _chosen(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    labels = [label for label in options.transports if installed(wire_of(label))]
    for claim, row in CLAIMS.items():
        if any(part in claim for part in options.claims):
            for label in row.over:
                if label in labels:
                    yield label, claim


def _in_processes(label: str, claim: str, options: argparse.Namespace) -> Json:
    """One claim over one transport, in a process of its own: a crash is an outcome too.

    Where the transport's library aborts that process, as it is known to, another makes the tries
    that are left: an abort counts for no try, and is shown.
    """
    begun, wire, outcomes, aborts = time.monotonic(), wire_of(label), list[Json](), 0
    while (left := options.tries - sum(one["tries"] for one in outcomes)) > 0:
        outcome, aborted = _in_a_process(wire, claim, left, options, seed=options.seed + aborts)
        outcomes.append(outcome)
        if not aborted:
            break
        aborts += 1
    total = _together(outcomes)
    met = total["hits"] is None or total["hits"] >= _HIT * total["tries"]
    held = 0 < total["tries"] == total["held"] and not total["faults"]
    seconds = time.monotonic() - begun
    total["aborts"] += aborts
    return total | {"seconds": seconds, "ok": held and met}


def _in_a_process(
    wire: Wire, claim: str, tries: int, options: argparse.Namespace, *, seed: int
) -> tuple[Json, bool]:
    """What a process has said of its tries, and whether the transport's library aborted it."""
    numbers = [str(number) for number in (tries, options.tokens, seed)]
    command = [sys.executable, "-m", "tests.attack.suite", wire.label, claim, *numbers]
    root, timeout = Path(__file__).parents[2], 120 + 30 * tries
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        # Files and a session of its own: what it leaves running holds up nothing, and is killed.
        with subprocess.Popen(
            command, stdout=out, stderr=err, env=os.environ | wire.settings, cwd=root,
            start_new_session=True,
        ) as process:  # fmt: skip
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                code = _HANGS
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = (_content(file) for file in (out, err))
    if code == _HANGS:
        stdout, stderr = "", "it hangs"
    said = [line for line in stdout.splitlines() if line.startswith(MARK)]
    outcome: Json = {"tries": 0, "held": 0, "hits": None, "faults": {}, "aborts": 0, "over": False}
    if said:
        outcome = json.loads(said[-1].removeprefix(MARK))
    aborted = code == -signal.SIGABRT and any(words in stderr for words in wire.aborts)
    if (code or not outcome.pop("over")) and not aborted:
        outcome["faults"][f"exit code {code}: {_reason(stderr)}"] = 1
    return outcome, aborted


def _content(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _together(outcomes: list[Json]) -> Json:
    """What several processes found."""
    hits = [one["hits"] for one in outcomes if one["hits"] is not None]
    faults: Counter[str] = Counter()
    for one in outcomes:
        faults.update(one["faults"])
    sums = {name: sum(one[name] for one in outcomes) for name in ("tries", "held", "aborts")}
    return sums | {"hits": sum(hits) if hits else None, "faults": dict(faults)}


def _reason(stderr: str) -> str:
    """What a process said last, or how it crashed."""
    lines = stderr.strip().splitlines()
    lines = [line for line in lines if not _LOG_LINE.match(line)] or [""]
    return next((line for line in lines if line.startswith("Fatal")), lines[-1])[:200]


def _table(rows: list[Json]) -> Table:
    table = Table(title="Attacks on the wire")
    for name in ("claim", "transport", "tries", "held", "in flight", "seconds", "what was found"):
        table.add_column(name, justify="left" if name in ("claim", "transport") else "right")
    for row in list(rows):
        if "ok" not in row:
            table.add_row(row["claim"], row["transport"], "...")
            continue
        style = "green" if row["ok"] else "bold red"
        hits = "" if row["hits"] is None else str(row["hits"])
        found = "; ".join(f"{what} ({times})" for what, times in row["faults"].items())
        if row["aborts"]:
            found = f"{found or 'held'}; {row['aborts']} processes ended by its library"
        cells = (str(row["tries"]), f"[{style}]{row['held']}[/]", hits, f"{row['seconds']:.0f}")
        table.add_row(row["claim"], row["transport"], *cells, found or "[green]held[/]")
    return table


if __name__ == "__main__":
    sys.exit(main())
