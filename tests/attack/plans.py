"""Plans, transports and bytes of the attacks: requests so large that a strike meets them moving."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from kvatlas.copying import copy_request
from kvatlas.copying.run_bounds import Bytes
from kvatlas.planning import Plan, plan
from kvatlas.routing import route, scattered
from kvatlas.specs import FullAttention, Spec
from tests.planning.models import model_of
from tests.wire.child import contents

_ATTENTION: dict[str, Spec] = {"attn": FullAttention(heads=8, head_dim=64)}
_MODEL = model_of("attacked", *[_ATTENTION] * 8)
TOKEN_BYTES = 16 << 10
"""Bytes of a token over all layers."""
PIECE = 1 << 20
NODE: dict[str, Any] = {"piece": PIECE, "buffers": 8}
"""How the nodes of the attacks are made."""


@dataclass(frozen=True)
class Wire:
    """A transport that is attacked, and the settings that it is attacked with."""

    label: str
    name: str
    settings: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    aborts: tuple[str, ...] = ()
    """What its library says as it aborts a process whose peer was killed: UCX over TCP."""

    @property
    def dies_with_reader(self) -> bool:
        """Whether a process may die of its reader's death."""
        return bool(self.aborts)

    @property
    def node(self) -> dict[str, Any]:
        """How nodes on it are made."""
        return NODE | {"options": self.options}


_NO_IB = {"UCX_MODULES": "^ib"}
_UCX_TCP = {**_NO_IB, "UCX_TLS": "tcp"}
MEETING_ABORT = "stubs.c:"
"""Of a process that connects, as its peer dies: agents meet over TCP whatever carries bytes."""
_UCX_ABORTS = ("ucp_request.inl:", MEETING_ABORT)
"""Of a process that is read, as its reader dies, and of one that connects."""
WIRES = {
    wire.label: wire
    for wire in (
        Wire("shm", "shm"),
        Wire("tcp", "tcp"),
        Wire("nixl", "nixl", _NO_IB),
        Wire("nixl-tcp", "nixl", _UCX_TCP, {"over_tcp": True}, _UCX_ABORTS),
        Wire("mooncake", "mooncake", {"MC_TRANSFER_TIMEOUT": "3"}),
    )
}


_LIBRARIES = {"nixl": ("nixl_cu13", "nixl_cu12", "nixl_rocm"), "mooncake": ("mooncake",)}


def installed(wire: Wire) -> bool:
    """Whether a transport's library is there; whether it works is for the attack to see."""
    names = _LIBRARIES.get(wire.name)
    return names is None or any(importlib.util.find_spec(name) for name in names)


@lru_cache
def made(layout: str, block_size: int, tokens: int, tp: int = 1) -> Plan:
    """A plan with room for one request of so many tokens, and a little more."""
    memory = tokens * TOKEN_BYTES // tp + (2 << 20)
    about: dict[str, Any] = {"layout": layout, "block_size": block_size, "max_len": tokens}
    return plan(_MODEL, memory=memory, in_flight=0, tp=tp, **about)


def source_plan(tokens: int) -> Plan:
    return made("LBNHC", 16, tokens)


def target_plan(tokens: int) -> Plan:
    return made("BLNHC", 32, tokens)


def source_ranks_plan(tokens: int) -> Plan:
    """The plan of a source with two ranks, each of which has half of the heads."""
    return made("LBNHC", 16, tokens, tp=2)


def after(
    src: Plan, seed: int | Sequence[int], dst: Plan, destination_seed: int, tokens: int
) -> dict[int, Bytes]:
    """What the destination's pools hold after a request has moved, every byte of them.

    `seed` is that of all source ranks, or of each.
    """
    into = contents(dst, destination_seed)
    seeds = [seed] * src.ranks if isinstance(seed, int) else seed
    ranks = {rank: contents(src, own, rank) for rank, own in enumerate(seeds)}
    tables = {"source_blocks": scattered(src, tokens), "destination_blocks": scattered(dst, tokens)}
    copy_request(route(src, dst), ranks, {0: into}, tokens=tokens, **tables)
    return into
