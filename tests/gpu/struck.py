"""A process that reads a large request, slowly, from one that is struck meanwhile.

What it sees is its answer: a process of its own, since a GPU that reads memory which is gone may
take along whoever had it read.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any
from unittest.mock import patch

import torch

from kvatlas import AtlasError
from kvatlas.models import Layer, Model
from kvatlas.planning import Plan, plan
from kvatlas.specs import FullAttention
from kvatlas.wire import Session
from kvatlas.wire.transports.cuda_link import CudaLink
from tests.gpu.peer import Peer, until
from tests.gpu.ranks import LargeRank

LAYERS = 32
TOKENS = {"cuda": 32768, "nixl": 4096}
"""Some gigabytes, of which one multiprocessor reads tens in a second; NIXL reads half a one."""


def large(layout: str, tokens: int, block: int) -> Plan:
    spec = FullAttention(heads=8, head_dim=128)
    layers = [Layer(name=f"layers.{i}.attn", index=i, spec=spec) for i in range(LAYERS)]
    model = Model(
        name="large", architecture="Large", layers=tuple(layers), depth=LAYERS,
        attention_heads=32, max_len=tokens,
    )  # fmt: skip
    memory = int(1.05 * tokens * LAYERS * 8 * 512)
    return plan(model, memory=memory, layout=layout, block_size=block, max_len=tokens, in_flight=0)


class Launches:
    """Notes when a copy is launched, and whether it is over."""

    def __init__(self) -> None:
        self.posted: Any = None
        self.begun = threading.Event()
        launch = CudaLink._launch

        def noted(link: CudaLink, *about: Any, **how: Any) -> Any:
            posted, over = launch(link, *about, **how)
            self.posted = posted
            self.begun.set()
            return posted, over

        patch.object(CudaLink, "_launch", noted).start()

    @property
    def under_way(self) -> bool:
        return self.posted is not None and not self.posted.done()


def main(wire: str, strike: str) -> None:
    """Pull, strike once the copy runs, and say how it ended."""
    tokens = TOKENS[wire]
    unlike = wire == "cuda"  # NIXL is told of every run
    src, dst = large("LBNHC", tokens, 16), large("BHLNC" if unlike else "LBNHC", tokens, 16)
    launches, peer = Launches(), Peer()
    said = peer.ask("serve_large", src=src.to_json().decode(), transport=wire, tokens=tokens)
    options = {"options": {"multiprocessors": 1, "share": 1.0}} if unlike else {}
    rank = LargeRank(dst, wire, tokens, **options)
    strikes: dict[str, Any] = {
        "kill": peer.kill, "free": lambda: peer.ask("free"),
        "withdraw": lambda: peer.ask("withdraw", request="r"),
    }  # fmt: skip
    peer.ask("offer", request="r")
    with Session(rank.nodes[0], said["endpoints"]) as session:
        asked: Any = {"destination_blocks": rank.blocks, "tokens": tokens, "timeout": 8}
        transfer = session.pull("r", **asked)
        if unlike:
            launches.begun.wait(20)
        else:
            time.sleep(0.3)
        before = launches.under_way if unlike else not transfer.done
        strikes[strike]()
        after = launches.under_way if unlike else not transfer.done
        code = "ready"
        try:
            transfer.wait(20)
        except AtlasError as refused:
            code = str(refused.code)
        released = until(lambda: transfer.released)
    try:
        usable = int(torch.ones(4, device="cuda").sum()) == 4
    except RuntimeError:
        usable = False
    answer = {"code": code, "before": before, "after": after, "released": released}
    print(json.dumps(answer | {"usable": usable, "ready": transfer.ready}), flush=True)
    if strike != "kill":
        peer.kill()


if __name__ == "__main__":
    main(*sys.argv[1:])
