"""The metadata that an end of the `cuda` transport publishes, and its validation."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from kvatlas.copying.cuda_driver import HANDLE_BYTES, UUID_BYTES
from kvatlas.copying.device_marks import EVENTS
from kvatlas.copying.memory import Memory
from kvatlas.wire.transports import errors
from kvatlas.wire.transports.offer_board import BoardPlace

_TOKEN = re.compile(r"[0-9a-f]{32}")
_MAX_ALLOCATIONS = 1024


class PublishedRegion(msgspec.Struct, forbid_unknown_fields=True, array_like=True):
    """A region: the index of its allocation, and its offset there."""

    allocation: int
    offset: int
    nbytes: int


class PublishedAllocation(msgspec.Struct, forbid_unknown_fields=True, array_like=True):
    """An allocation that other processes can map."""

    handle: bytes
    nbytes: int


class PublishedMemory(msgspec.Struct, tag="cuda", forbid_unknown_fields=True):
    """Handles of allocations and events, and the offsets of regions."""

    host: str
    token: str
    device: bytes
    allocations: list[PublishedAllocation]
    regions: dict[int, PublishedRegion]
    events: list[bytes]
    board: BoardPlace | None = None


def check_form(published: PublishedMemory, memory: Mapping[int, Memory]) -> None:
    """Raise an error for metadata that no transport with these regions publishes."""
    handles = [*(one.handle for one in published.allocations), *published.events]
    if not _TOKEN.fullmatch(published.token) or len(published.device) != UUID_BYTES:
        raise errors.bad_metadata("a token or device id of the wrong length")
    if any(len(handle) != HANDLE_BYTES for handle in handles) or len(published.events) != EVENTS:
        raise errors.bad_metadata("handles of the wrong length or number")
    if len(published.allocations) > _MAX_ALLOCATIONS:
        raise errors.bad_metadata(f"{len(published.allocations)} allocations, which are too many")
    for pool, at in memory.items():
        region = published.regions.get(pool)
        if region is None or region.nbytes != at.nbytes:
            if at.nbytes:
                raise errors.bad_metadata(f"region {pool}, which does not match the handshake")
            continue
        if not 0 <= region.allocation < len(published.allocations):
            raise errors.bad_metadata(f"region {pool} in an allocation that is not published")
        nbytes = published.allocations[region.allocation].nbytes
        if region.nbytes < 0 or not 0 <= region.offset <= nbytes - region.nbytes:
            raise errors.bad_metadata(f"region {pool}, which exceeds its allocation")
