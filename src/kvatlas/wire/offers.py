"""Offers: the blocks of a request that peers may read, and the layers already written."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.address_arrays import Int64s
from kvatlas.models import CacheIdentity
from kvatlas.planning import Plan
from kvatlas.wire.block_ledger import BlockClaim

Released = Callable[[str, str], None]
"""Called with a request's name and the reason why its offer ended.

The reason is `read`, `let_go`, `expired`, `withdrawn` or `closed`.
"""

Destination = tuple[bytes, int]
"""A rank that reads an offer: (hash of its plan, rank number)."""


class WrittenLayers:
    """The written layers of an offer, each with the GPU event that follows its kernels."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._written: dict[str, int | None] = {}
        self._changed = threading.Condition()

    def add(self, layer: str, mark: int | None) -> None:
        """Record that a layer is valid once GPU event `mark` completes; None means now."""
        with self._changed:
            problem = ""
            if layer not in self._names:
                problem = "The node's plan has no such layer"
            elif layer in self._written:
                problem = "The layer was already marked as written"
            if problem:
                hint = "Call layer_written once per layer of the node's plan"
                raise AtlasError(Code.UNKNOWN_LAYER, problem, got=repr(layer)[:300], hint=hint)
            self._written[layer] = mark
            self._changed.notify_all()

    @property
    def complete(self) -> bool:
        """Whether all layers are written."""
        with self._changed:
            return len(self._written) == len(self._names)

    def wait(self, layer: str, timeout: float) -> tuple[bool, int | None]:
        """Wait up to `timeout` seconds until a layer is written.

        Return whether the layer is written, and the GPU event after its kernels, if any.
        """
        with self._changed:
            written = self._changed.wait_for(lambda: layer in self._written, timeout)
            return written, self._written.get(layer)


@dataclass
class Offer:
    """Blocks of a request that stay unchanged until peers have read them or the offer expires."""

    request: str
    blocks: Mapping[int, Int64s]
    start: int
    stop: int
    expires: float
    released: Released | None = None
    readers: frozenset[str] | None = None
    """Names of the nodes that may read the offer; None if any node may."""
    mark: int | None = None
    """The GPU event (see `DeviceMarks`) after which the blocks are valid; None on the host."""
    layers: WrittenLayers | None = None
    """The layers that are written so far; None if all layers are written."""
    claim: BlockClaim | None = None
    """The claim on the blocks in the node's ledger; None for an offer of a peer."""
    identity: CacheIdentity | None = None
    """The identity of the cache; None if the node compares no identities."""
    read_by: set[Destination] = field(default_factory=set)
    """Ranks that have finished reading the offer."""
    let_go_by: set[Destination] = field(default_factory=set)
    """Ranks in `read_by` that have not confirmed that they read the whole offer."""
    seconds: float = math.inf
    """The seconds for which the offer is kept after its last sign of a reader."""
    ends: float = math.inf
    """When the offer ends at the latest, whatever its readers ask."""

    def keep(self, seconds: float) -> float:
        """Keep the offer for `seconds` from now. Return the seconds left.

        One call extends the offer by at most the timeout with which it was made. This is called for
        a reader that makes progress. While layers are missing, no reader can make progress, so the
        time is not extended. Call this under the node's lock.
        """
        now = time.monotonic()
        waiting = self.layers is not None and not self.layers.complete
        latest = self.expires if waiting else self.ends
        until = min(now + min(seconds, self.seconds), latest)
        self.expires = max(self.expires, until)
        return until - now

    def may_be_read_by(self, name: str) -> bool:
        """Whether a node of this name may read the offer."""
        return self.readers is None or name in self.readers

    def finished(self, own: Destination, others: set[Destination], *, read: bool) -> str:
        """Record that rank `own` has finished. `read` is true if it has read the whole offer.

        Return an empty string if one of the ranks `others` has not finished. Otherwise the offer
        ends: return "read" if all ranks have read the whole offer, else "let_go".
        """
        if read:
            self.let_go_by.discard(own)
        elif own not in self.read_by:
            self.let_go_by.add(own)
        self.read_by.add(own)
        if not others <= self.read_by:
            return ""
        return "let_go" if self.let_go_by & {own, *others} else "read"

    def check_asked(self, tokens: tuple[int, int], told: Mapping[int, Int64s], plan: Plan) -> None:
        """Raise an error if a token is not offered, or `told` differs from the offered blocks.

        `told` are the source's block tables according to the reader.
        """
        for group, ids in told.items():
            mine = self.blocks.get(group)
            if mine is None or len(ids) != len(mine) or (ids != mine)[mine >= 0].any():
                raise AtlasError(
                    Code.UNKNOWN_REQUEST,
                    "The given source blocks are not the blocks of the offer",
                    got=f"different block ids for group {group}",
                    hint="Omit source_blocks= to use the blocks of the offer",
                )
        # If the offer has a single recurrent state, it is the state after the last token.
        alone = any(
            group.kind == "recurrent" and len(self.blocks.get(index, ())) == 1
            for index, group in enumerate(plan.groups)
        )
        start, stop = tokens
        overwritten = self._overwritten(stop, plan)
        if not self.start <= start <= stop <= self.stop:
            problem = f"The tokens must be within those of the offer, ({self.start}, {self.stop})"
            hint = "Request only tokens that the source offers"
        elif alone and stop != self.stop:
            problem = (
                f"The tokens must end at {self.stop}: the offer has the recurrent state after its "
                "last token only"
            )
            hint = f"Pass tokens=({start}, {self.stop})"
        elif overwritten:
            problem = (
                f"The tokens must end at {self.stop}: the ring buffer of layer {overwritten!r} "
                "no longer has the rows that a shorter range needs"
            )
            hint = f"Pass tokens=({start}, {self.stop})"
        else:
            return
        raise AtlasError(Code.BAD_TOKENS, problem, got=(start, stop), hint=hint)

    def _overwritten(self, stop: int, plan: Plan) -> str:
        """Return the name of a layer that lacks rows which are needed after `stop` tokens.

        Only a layer with a ring can lack rows: a ring keeps the rows of the last offered tokens,
        and overwrites older rows. Return an empty string if no layer lacks rows.
        """
        for name, ring in plan.rings.items():
            if int(ring.visibility.first(stop)) < min(stop, self.stop - ring.rows):
                return name
        return ""
