"""Engines that run plans of kvatlas, and the requests that they and plain vLLM answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.vllm.comparing import difference, prompt
from tests.vllm.engine_process import Answer, Engine, engine

PLAIN = "vLLM"
LENGTHS = (2, 31, 63, 64, 65, 127, 129, 191, 193, 287, 289, 517)
"""Around the borders of blocks of 32, 64, 96, 128 and 288 tokens."""
SHARED = 250
"""Tokens of a prefix that several requests share."""


@dataclass
class Figures:
    """What one engine answered, and the figures of its plan."""

    plan: str
    block: int
    blocks: int
    groups: int
    fits: float
    """Requests of max_model_len, by vLLM's own function."""
    answers: dict[str, Answer] = field(default_factory=dict)
    hits: int = 0
    last_hits: int = 0
    """Of the last request with each shared prefix: vLLM has then saved the state where it ends."""
    asked: int = 0

    def row(self, right: Figures) -> str:
        worst = max(difference(right.answers[key], self.answers[key]) for key in right.answers)
        return (
            f"{self.plan:>14} {self.block:>6} {self.blocks:>7} {self.groups:>7} {self.fits:>9.2f} "
            f"{self.hits:>6} of {self.asked} {worst:>9.1e}"
        )


HEADER = (
    f"{'plan':>14} {'block':>6} {'blocks':>7} {'groups':>7} {'requests':>9} "
    f"{'hits':>6}    tokens   logprobs"
)


@contextmanager
def planned_engine(
    model: Path,
    plan: str,
    *,
    caching: bool = False,
    batch: int = 64,
    memory: int = 12 << 20,
    imports: str = "",
    settings: dict[str, str] | None = None,
    **options: Any,
) -> Iterator[Engine]:
    """An engine with a value of KVATLAS_PLAN; `PLAIN` for none. `imports` is a module to import,
    `settings` is more of its environment.

    With prefix caching, vLLM's CPU kernel crashes in prefills longer than a block, so `batch`
    tokens at once are at most a block of the smallest plan.
    """
    environment = dict(settings or {})
    if plan != PLAIN:
        environment["KVATLAS_PLAN"] = plan
    if imports:
        environment["TEST_IMPORTS"] = imports
    about: dict[str, Any] = {
        "num_gpu_blocks_override": None,
        "kv_cache_memory_bytes": memory,
        "block_size": 32,
        "enable_prefix_caching": caching,
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": batch,
        "max_num_seqs": 16,
    }
    given = {"name": plan.replace(",", "-"), "core": "0"} | about | options
    with engine(model, environment=environment, **given) as made:
        yield made


def ask(made: Engine, plan: str, *, long: int = 40) -> Figures:
    """Ask an engine everything: lengths around borders, 16 requests at once, shared prefixes."""
    facts = made.started
    found = Figures(plan, facts["block"], facts["blocks"], facts["groups"], facts["fits"])
    for length in LENGTHS:
        found.answers[f"{length} tokens"] = made.generate(prompt(length))
    found.answers["long decode"] = made.generate(prompt(55, seed=3), tokens=long)
    names = [made.add(prompt(40 + 29 * n, seed=n + 5)) for n in range(16)]
    for n, name in enumerate(names):
        found.answers[f"one of 16: {n}"] = made.wait(name)
    for n in range(16):
        begin, rest = prompt(SHARED, seed=40 + n % 4), prompt(30 + n, seed=60 + n)
        answer = made.generate([*begin, *rest])
        found.answers[f"shared prefix {n}"] = answer
        found.last_hits += answer.cached if n >= 12 else 0
        found.hits, found.asked = found.hits + answer.cached, found.asked + SHARED + 30 + n
    return found
