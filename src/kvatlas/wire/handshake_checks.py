"""Check the plan, memory and identity in a peer's hello before anything else uses them."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from kvatlas.copying.memory import STAGING, Memory
from kvatlas.errors import AtlasError, Code
from kvatlas.models import CacheIdentity
from kvatlas.planning import Plan
from kvatlas.planning.plans import check_plan_version
from kvatlas.routing import Scales, fingerprint
from kvatlas.routing.conversion import parse_conversion, spell_conversion, tensor_scales
from kvatlas.wire.encoding import check_versions
from kvatlas.wire.protocol import VERSION, ConversionTerms, Hello, bad_handshake

ALIGNMENT = 8
"""The required alignment of pool addresses in bytes, which is the size of the largest dtype."""

_MAX_RANKS = 1024
_MAX_PAGES = 1 << 14
"""The maximum pages per block over all regions of a plan; the deepest models have hundreds."""
_MAX_REGIONS = 1 << 11
"""The maximum regions or pools of a plan; the largest models need tens."""
_MAX_PLANS = 64


@dataclass(frozen=True)
class Peer:
    """Another node, as described by a hello that has passed the checks."""

    name: str
    incarnation: bytes
    plan: Plan
    plan_hash: bytes
    rank: int
    memory: dict[int, Memory]
    metadata: bytes
    conversion: ConversionTerms | None = None
    identity: CacheIdentity | None = None
    version: int = VERSION
    names: frozenset[str] | None = None
    """The node names that the peer's key proves; None if the peer may use any name."""
    padding: bool = False
    """Whether the peer copies padding."""


class PeerPlans:
    """Recent plans of peers, by hash, so that a peer sends its plan only once.

    If there are too many plans, the oldest is dropped.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Plan] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, hello: Hello) -> Plan | None:
        """Return the plan of a hello, or None if the peer must send it."""
        check_versions(hello.version, hello.oldest)
        if hello.plan is None:
            return self._known.get(hello.plan_hash)
        if hashlib.sha256(hello.plan).digest() != hello.plan_hash:
            raise bad_handshake("a plan that does not match its hash")
        check_plan_size(hello.plan)
        plan = Plan.from_json(hello.plan)
        with self._lock:
            self._known[hello.plan_hash] = plan
            while len(self._known) > _MAX_PLANS:
                self._known.popitem(last=False)
        return plan

    def __len__(self) -> int:
        return len(self._known)


class _RegionOutline(msgspec.Struct):
    layers: list[msgspec.Raw]


class _PlanOutline(msgspec.Struct):
    """A plan, decoded only far enough to see how large it is."""

    regions: list[_RegionOutline]
    pools: list[msgspec.Raw] = []
    tp: int = 1
    pp: int = 1


# msgspec crashes if two threads decode a type for the first time at once. So this module does it.
msgspec.json.Decoder(_PlanOutline)


def check_plan_size(plan: bytes) -> None:
    """Raise an error if the JSON of a plan is larger than any real model's plan."""
    try:
        check_plan_version(plan)
        outline = msgspec.json.decode(plan, type=_PlanOutline)
    except (msgspec.MsgspecError, ValueError, RecursionError) as problem:
        if isinstance(problem, AtlasError):
            raise
        raise bad_handshake(f"a plan that cannot be read: {problem}"[:200]) from None
    regions = max(len(outline.regions), len(outline.pools))
    pages = sum(len(region.layers) for region in outline.regions)
    ranks = outline.tp * outline.pp
    if pages > _MAX_PAGES or regions > _MAX_REGIONS or not 0 < ranks <= _MAX_RANKS:
        raise bad_handshake(
            f"a plan with {pages:,} pages (limit {_MAX_PAGES:,}), {regions:,} regions or pools "
            f"(limit {_MAX_REGIONS:,}) and {ranks:,} ranks (expected 1 to {_MAX_RANKS:,})",
            problem="The plan is too large for a real model",
            hint="Plan fewer layers, pools or ranks",
        )


def plan_hash(plan: Plan) -> bytes:
    """Return the hash that identifies a plan."""
    return hashlib.sha256(plan.without_notes().to_json()).digest()


def conversion_terms(plan: Plan, convert: str | None, scales: Scales) -> ConversionTerms | None:
    """Return the message with the conversion that a node accepts; None if `convert` is None."""
    if convert is None:
        return None
    given = tensor_scales(scales, plan.layers)
    return ConversionTerms(
        convert=spell_conversion(parse_conversion(convert)),
        scales={name: (scale.k, scale.v) for name, scale in given.items()},
    )


def checked_peer(
    hello: Hello, plan: Plan, transport: str, names: frozenset[str] | None = None
) -> Peer:
    """Return the peer that a hello describes, or raise an error.

    `names` are the node names that the peer's key proves; None if the peer may use any name.
    """
    if hello.transport != transport:
        raise bad_handshake(
            f"{transport!r}, but {hello.transport!r} at node {hello.name!r}",
            "The two ends use different transports",
            "Use the same transport in both nodes",
        )
    if hello.fingerprint != fingerprint(plan):
        raise bad_handshake("a fingerprint that does not match the plan")
    if hello.rank >= plan.ranks:
        raise bad_handshake(f"rank {hello.rank}, expected 0..{plan.ranks - 1}")
    memory = {one.index: one.memory for one in hello.memory}
    if len(memory) < len(hello.memory):
        raise bad_handshake("a region that is listed twice")
    if set(memory) == {STAGING}:  # its pools are private: peers reach staging buffers only
        _check_disjoint(memory)
        if not memory[STAGING].nbytes:  # each peer gets its own buffers when it borrows some
            del memory[STAGING]
    else:
        check_memory(plan, hello.rank, memory)
    return Peer(
        hello.name,
        hello.incarnation,
        plan,
        hello.plan_hash,
        hello.rank,
        memory,
        hello.metadata,
        hello.conversion,
        hello.identity,
        hello.version,
        names,
        hello.padding,
    )


def check_same_identity(
    mine: CacheIdentity | None, theirs: CacheIdentity | None, *, nodes: tuple[str, str]
) -> None:
    """Raise `different_identity` unless two nodes use the same weights and settings.

    `nodes` are the names of this node and of the peer. The error contains both names, because users
    of either node may read it.

    >>> base = CacheIdentity(weights="base")
    >>> check_same_identity(base, CacheIdentity(weights="tuned"), nodes=("here", "there"))
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: The two ends compute their caches with different weights or \
settings. Got weights 'base' and 'tuned' (nodes 'here' and 'there'). Serve the same checkpoint at \
both ends, or pass check_identity=False at both. [different_identity]
    """
    if mine == theirs:
        return
    if mine is None:
        got = f"no identity at node {nodes[0]!r}, but an identity at {nodes[1]!r}"
    elif theirs is None:
        got = f"weights {mine.weights!r} at node {nodes[0]!r}, but no identity at {nodes[1]!r}"
    else:
        got = f"{mine.differences(theirs)} (nodes {nodes[0]!r} and {nodes[1]!r})"
    hint = "Serve the same checkpoint at both ends, or pass check_identity=False at both"
    raise AtlasError(Code.DIFFERENT_IDENTITY, got=got, hint=hint)


def check_memory(plan: Plan, rank: int, memory: Mapping[int, Memory]) -> None:
    """Raise an error for a memory region that is too small, misaligned, overlapping or unknown."""
    pools = plan.rank_pools(rank)
    if set(memory) - {STAGING} != set(pools):
        given = sorted(set(memory) - {STAGING})
        raise bad_handshake(f"memory for pools {given}, expected pools {sorted(pools)}")
    for index, pool in pools.items():
        address, nbytes = memory[index].address, memory[index].nbytes
        if nbytes < pool.nbytes:
            expected = f"expected at least {pool.nbytes:,}"
            raise bad_handshake(f"pool {index} of {nbytes:,} bytes, {expected}")
        if address % ALIGNMENT or not address:
            expected = f"expected a multiple of {ALIGNMENT} above 0"
            raise bad_handshake(f"pool {index} at address {address:#x}, {expected}")
        if pool.segments is not msgspec.UNSET:
            problem = "A node needs each pool in one allocation"
            got = f"pool {index} with {len(pool.segments)} segments"
            hint = "Allocate the engine's tensors of a pool in one buffer, and describe that buffer"
            raise AtlasError(Code.BAD_PLAN, problem, got=got, hint=hint)
    _check_disjoint(memory)


def _check_disjoint(memory: Mapping[int, Memory]) -> None:
    """Raise an error for memory regions that overlap."""
    placed = sorted(memory.values(), key=lambda region: (region.device, region.address))
    for one, two in pairwise(placed):
        if one.device == two.device and one.address + one.nbytes > two.address:
            raise bad_handshake(f"two regions that overlap at address {two.address:#x}")
