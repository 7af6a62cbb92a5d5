"""Generate `docs/reference/data/hybrids.md`, which compares plans of hybrid models.

For each model, the table contains vLLM's plan and the plan of the policy `atlas`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

from kvatlas.cli.compare import way_of
from kvatlas.errors import AtlasError
from kvatlas.models import Model, catalogue
from kvatlas.planning import Plan, Policy, padding, plan
from kvatlas.planning.plan_data import DECODING
from kvatlas.planning.sized_layers import kind_of

TP = (1, 2, 8)
MEMORY = "60GiB"
MAX_LEN = 32768
USERS_AT = (4096, 32768)
_PATIENCE = 2.0

_PAGE = f"""\
# Hybrid models: two plans

The table compares vLLM's plan with the plan of policy `atlas`, for every hybrid of the catalogue and
{MEMORY} of cache memory on each rank. A command generates this page, and a test compares the two:

```sh
kvatlas hybrids > docs/reference/data/hybrids.md
```

| column | meaning |
|---|---|
| block | tokens per block |
| padding | bytes that no token can use, as a share of a request of {MAX_LEN:,} tokens; the unfilled end of its last block is not counted |
| tokens | tokens that fit, in requests of {MAX_LEN:,} tokens, even if the model was trained for fewer |
| 4k, 32k | users that fit while they decode, at 4,096 and 32,768 tokens |
| way | storage of recurrent states: in blocks that otherwise hold N attention layers (`pack N`), or as in vLLM if no smaller block fits as many users |
| runs | whether vLLM can run the plan of `atlas`; otherwise the block size of the plan that it can run (`--runs-on vllm`) |

A refused plan shows its [error code](../errors.md).

"""  # noqa: E501
_FIGURES = "block | padding | tokens | 4k | 32k"
_PAGE += f"""\
| model | tp | vLLM: {_FIGURES} | atlas: {_FIGURES} | way | runs |
|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|--:|
"""

T = TypeVar("T")


def hybrids_page() -> str:
    """Return the whole page as Markdown."""
    cases = [(name, tp) for name in hybrids() for tp in TP]
    return _PAGE + "".join(_line(name, tp) for name, tp in patiently(cases, "Planning hybrids"))


def hybrids() -> list[str]:
    """Return the names of the models that have both recurrent states and attention."""
    kinds = {name: {kind_of(x.spec) for x in Model.load(name).layers} for name in catalogue()}
    return [name for name, kept in kinds.items() if "recurrent" in kept and len(kept) > 1]


def patiently(items: Sequence[T], what: str) -> Iterator[T]:
    """Yield the items. After two seconds, show a progress bar if stderr is a terminal.

    `what` is the label of the progress bar.
    """
    console = Console(stderr=True)
    progress = Progress(console=console, transient=True)
    task = progress.add_task(what, total=len(items))
    start = time.monotonic()
    try:
        for item in items:
            if console.is_terminal and time.monotonic() - start > _PATIENCE:
                progress.start()
            yield item
            progress.advance(task)
    finally:
        if progress.live.is_started:  # `stop` prints even if stderr is no terminal
            progress.stop()


def _line(name: str, tp: int) -> str:
    theirs, ours = _plan(name, tp, "vllm"), _plan(name, tp, "atlas")
    way = way_of(ours) or "" if isinstance(ours, Plan) else ""
    if isinstance(ours, Plan) and isinstance(theirs, Plan) and ours.regions == theirs.regions:
        way = "vLLM's own"
    cells = (name, str(tp), *_figures(theirs), *_figures(ours), way, _runs(name, tp, ours))
    return f"| {' | '.join(cells)} |\n"


def _runs(name: str, tp: int, ours: Plan | AtlasError) -> str:
    """Return the table cell that shows whether vLLM can run the plan `ours`.

    The cell contains "yes", the block size of a larger plan that vLLM can run, or an error code. If
    there is no plan, the cell is empty.
    """
    if isinstance(ours, AtlasError):
        return ""
    if not ours.summary()["not_runnable"]:
        return "yes"
    found = _plan(name, tp, "atlas", runs_on="vllm")
    return f"{found.block_size:,}" if isinstance(found, Plan) else f"`{found.code}`"


def _plan(name: str, tp: int, policy: Policy, runs_on: str | None = None) -> Plan | AtlasError:
    try:
        return plan(name, memory=MEMORY, tp=tp, max_len=MAX_LEN, policy=policy, runs_on=runs_on)
    except AtlasError as refusal:
        return refusal


def _figures(made: Plan | AtlasError) -> tuple[str, ...]:
    if isinstance(made, AtlasError):
        return (f"`{made.code}`", *[""] * 4)
    users = (f"{int(made.requests(n, in_flight=DECODING)):,}" for n in USERS_AT)
    return f"{made.block_size:,}", f"{padding(made).share:.2%}", f"{made.tokens:,}", *users
