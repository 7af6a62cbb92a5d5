"""What a peer says of itself, held against its own plan before any of it is used."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.routing import fingerprint
from kvatlas.wire.protocol import VERSION, Hello, bad_handshake
from kvatlas.wire.transports.base import STAGING, Memory

ALIGNMENT = 8
"""Bytes that a pool's address is a multiple of: no element of any dtype is larger."""

_RANKS = 1024
_SLOTS = 1 << 14
_PARTS = 1 << 11
"""Regions or pools of a plan; the largest that models need have tens."""
_PLANS = 64


@dataclass(frozen=True)
class Peer:
    """Another process, as its hello described it and as it was found to be sound."""

    name: str
    run: bytes
    plan: Plan
    plan_hash: bytes
    rank: int
    memory: dict[int, Memory]
    transport: str
    metadata: bytes


class Plans:
    """Plans of peers by their hash, so that a plan travels once; the oldest are forgotten."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Plan] = OrderedDict()

    def find(self, hello: Hello) -> Plan | None:
        """The plan that a hello is about; None where it has to be sent."""
        refuse_version(hello)
        if hello.plan is None:
            return self._known.get(hello.plan_hash)
        if hashlib.sha256(hello.plan).digest() != hello.plan_hash:
            raise bad_handshake("a plan whose hash is another")
        refuse_large(hello.plan)
        found = Plan.from_json(hello.plan)
        self._known[hello.plan_hash] = found
        while len(self._known) > _PLANS:
            self._known.popitem(last=False)
        return found


class _Sized(msgspec.Struct):
    """A region of a plan, read only far enough to count its layers."""

    layers: list[msgspec.Raw]


class _Counted(msgspec.Struct):
    regions: list[_Sized]
    pools: list[msgspec.Raw] = []
    tp: Any = 1
    pp: Any = 1


def refuse_large(plan: bytes) -> None:
    """Refuse a plan that would cost more to check than any model's does."""
    try:
        counted = msgspec.json.decode(plan, type=_Counted)
    except (msgspec.MsgspecError, ValueError, RecursionError) as problem:
        raise bad_handshake(f"a plan that cannot be read: {problem}"[:200]) from None
    parts = max(len(counted.regions), len(counted.pools))
    slots = sum(len(region.layers) for region in counted.regions)
    sizes = [size for size in (counted.tp, counted.pp) if isinstance(size, int)]
    ranks = sizes[0] * sizes[1] if len(sizes) == 2 else 0
    if slots > _SLOTS or parts > _PARTS or not 0 < ranks <= _RANKS:
        raise bad_handshake(f"a plan with {slots} slots in {parts} parts on {ranks} ranks")


def plan_hash(plan: Plan) -> bytes:
    """What stands for a plan that a peer has seen."""
    return hashlib.sha256(plan.to_json()).digest()


def refuse_version(hello: Hello) -> None:
    """Refuse another version before anything else that it says is read."""
    if hello.version != VERSION:
        raise AtlasError(
            Code.UNLIKE_VERSIONS,
            f"Both ends speak version {VERSION} of the protocol",
            got=f"version {hello.version}",
            hint="Run the same version of kvatlas at both ends",
        )


def checked_peer(hello: Hello, plan: Plan, transport: str) -> Peer:
    """The peer behind a hello, or a coded refusal."""
    if hello.transport != transport:
        raise bad_handshake(f"transport {hello.transport!r} where this end has {transport!r}")
    if hello.fingerprint != fingerprint(plan):
        raise bad_handshake("a fingerprint that is not its plan's")
    if hello.rank >= plan.tp * plan.pp:
        raise bad_handshake(f"rank {hello.rank} of tp {plan.tp} x pp {plan.pp}")
    memory = {s.index: Memory(s.address, s.nbytes, s.device) for s in hello.spots}
    if len(memory) < len(hello.spots):
        raise bad_handshake("a region twice")
    check_memory(plan, hello.rank, memory)
    return Peer(
        hello.name,
        hello.run,
        plan,
        hello.plan_hash,
        hello.rank,
        memory,
        hello.transport,
        hello.metadata,
    )


def check_memory(plan: Plan, rank: int, memory: dict[int, Memory]) -> None:
    """Refuse regions that are not the pools of a rank: too small, misaligned, overlapping."""
    pools = {pool.index: pool for pool in plan.pools if pool.stage == rank // plan.tp}
    if set(memory) - {STAGING} != set(pools):
        raise bad_handshake(f"regions {sorted(memory)} for pools {sorted(pools)}")
    for index, pool in pools.items():
        if memory[index].nbytes < pool.nbytes:
            got = f"{memory[index].nbytes} bytes for pool {index} of {pool.nbytes}"
            raise bad_handshake(got)
        if memory[index].address % ALIGNMENT or not memory[index].address:
            raise bad_handshake(f"pool {index} at address {memory[index].address}")
    placed = sorted(memory.values(), key=lambda region: (region.device, region.address))
    for one, two in pairwise(placed):
        if one.device == two.device and one.address + one.nbytes > two.address:
            raise bad_handshake("regions that overlap")
    if any(region.address + region.nbytes > 1 << 63 for region in placed):
        raise bad_handshake("a region past the end of memory")
