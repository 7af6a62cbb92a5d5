"""The prefill process: runs prompts, puts their caches on the wire, one task after another.

Each line of stdin is a task, each answer a marked line of stdout; an empty line ends it.
"""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from typing import Any

import torch

from kvatlas.engines.transformers import AtlasCache, make_plan
from kvatlas.engines.transformers.simulated_ranks import SimulatedRanks
from tests.handover.tiny import LONGEST, PROMPT, model_of, prompt

MARK = "prefilled "


@lru_cache
def prefilled(name: str, number: int) -> tuple[AtlasCache, int]:
    """The cache of a prompt, and the first token after it."""
    model = model_of(name)
    cache = AtlasCache.from_config(model.config, batch=1, max_len=LONGEST)
    with torch.no_grad():
        ids = model.generate(
            prompt(number), past_key_values=cache, max_new_tokens=1, do_sample=False
        )
    return cache, int(ids[0, -1])


def run(task: dict[str, Any]) -> tuple[SimulatedRanks, dict[str, Any]]:
    model = model_of(task["model"])
    plan = make_plan(model.config, batch=4, max_len=LONGEST, **task["plan"])
    secret = b"shared by both ends"
    ranks = SimulatedRanks(plan, task["transport"], name="prefill", model=model, secret=secret)
    said = {}
    for number in task["prompts"]:
        cache, first = prefilled(task["model"], number)
        blocks = ranks.copy_from(cache, PROMPT)
        # The ranks' blocks are the same for all prompts: only the last is on offer.
        for node in ranks.nodes:
            node.withdraw("request")
            node.offer("request", blocks, PROMPT, timeout=120)
        said[number] = first
    return ranks, {"endpoints": ranks.endpoints, "first": said}


def main() -> None:
    ranks: SimulatedRanks | None = None
    for line in sys.stdin:
        if ranks is not None:
            ranks.close()
        if not line.strip():
            break
        ranks, said = run(json.loads(line))
        print(MARK + json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
