"""An engine in a process of its own, on a tier that others use at the same time.

It has conversations that others have too, in an order of its own, and holds every answer against
a run without a tier. At the end it says how often it has loaded, and stored, what.
"""

from __future__ import annotations

import json
import sys
from random import Random

import torch

from tests.engines.guarded import guarded
from tests.engines.test_tiered_prefixes import ask, engine, prompts


def main(name: str, where: str, number: str) -> None:
    torch.set_num_threads(1)
    dice = Random(int(number))  # noqa: S311
    with guarded() as pages:
        for _ in range(2):
            with engine(name, pages, where, int(number) % 2) as own:
                for begun in dice.sample(prompts(), 3):
                    _, said = ask(name, own, begun[:40])
                    ask(name, own, [*said, *begun[40:60]])  # the conversation goes on
                print("counts " + json.dumps(own.tiered.counts), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
