"""What connectors make of pairs of engines, collected by the tests and printed at their end."""

from __future__ import annotations

import io
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

OURS, THEIRS = "kvatlas", "NixlConnector"
RIGHT = "right"


def engine_label(options: dict[str, Any]) -> str:
    """An engine of a pair, in the table's words.

    >>> engine_label({"block_size": 64, "tensor_parallel_size": 2})
    'block 64, tp 2'
    """
    tp, pp = (options.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline"))
    ranks = "".join(f", {name} {size}" for name, size in (("tp", tp), ("pp", pp)) if size > 1)
    return f"block {options['block_size']}{ranks}"


@dataclass
class Verdicts:
    """By model and way, connector and prompt length: right, refused, or how wrong."""

    found: dict[tuple[str, str], dict[str, dict[int, str]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )

    def note(self, model: str, way: str, connector: str, length: int, verdict: str) -> None:
        """Enter what became of one prompt."""
        self.found[model, way][connector][length] = verdict

    def table(self) -> str:
        """All of them, a line for each pair."""
        from rich.console import Console
        from rich.table import Table

        table = Table("model", "prefill -> decode", OURS, THEIRS, title="tokens and logprobs")
        for (model, way), by_connector in self.found.items():
            cells = [in_short(by_connector.get(name, {})) for name in (OURS, THEIRS)]
            table.add_row(model, way, *cells)
        console = Console(file=io.StringIO(), width=110, color_system=None)
        console.print(table)
        return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def in_short(verdicts: dict[int, str]) -> str:
    """Verdicts of several lengths in a few words.

    >>> in_short({128: "right", 191: "wrong (0.303)", 192: "right"})
    'right at 2 lengths; wrong (0.303) at 191'
    >>> in_short({64: "refused", 65: "refused"})
    'refused at all 2 lengths'
    """
    by_verdict: dict[str, list[int]] = defaultdict(list)
    for length, verdict in verdicts.items():
        by_verdict[verdict].append(length)
    if len(by_verdict) == 1:
        return f"{next(iter(by_verdict))} at all {len(verdicts)} lengths"
    rest = [
        f"{verdict} at {', '.join(map(str, lengths))}"
        for verdict, lengths in by_verdict.items()
        if verdict != RIGHT
    ]
    right = [f"{RIGHT} at {len(by_verdict[RIGHT])} lengths"] if by_verdict[RIGHT] else []
    return "; ".join(right + rest) or "not run"
