"""The metadata that an end of the `cuda` transport publishes, and its validation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from kvatlas.copying.cuda_driver import HANDLE_BYTES, UUID_BYTES
from kvatlas.copying.device_marks import EVENTS
from kvatlas.copying.memory import Memory
from kvatlas.wire.transports import errors
from kvatlas.wire.transports.offer_board import BoardPlace

_MAX_ALLOCATIONS = 1024
_Handle = Annotated[bytes, Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]


class PublishedRegion(msgspec.Struct, forbid_unknown_fields=True, array_like=True):
    """A region: index of its allocation, byte offset in the allocation, and size in bytes."""

    allocation: int
    offset: int
    nbytes: int


class PublishedAllocation(msgspec.Struct, forbid_unknown_fields=True, array_like=True):
    """An allocation that other processes can map: its IPC handle and its size in bytes."""

    handle: _Handle
    nbytes: int


class PublishedMemory(msgspec.Struct, tag="cuda", forbid_unknown_fields=True):
    """Handles of allocations and events, and the offsets of regions."""

    host: str
    token: Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    device: Annotated[bytes, Meta(min_length=UUID_BYTES, max_length=UUID_BYTES)]
    allocations: Annotated[list[PublishedAllocation], Meta(max_length=_MAX_ALLOCATIONS)]
    regions: dict[int, PublishedRegion]
    events: Annotated[list[_Handle], Meta(min_length=EVENTS, max_length=EVENTS)]
    board: BoardPlace | None = None


def check_regions(published: PublishedMemory, memory: Mapping[int, Memory]) -> None:
    """Raise `bad_handshake` for metadata that a transport with these regions cannot publish."""
    for pool, at in memory.items():
        region = published.regions.get(pool)
        if region is None or region.nbytes != at.nbytes:
            if at.nbytes:
                got = f"no region {pool} of {at.nbytes:,} bytes, as in the handshake"
                raise errors.bad_metadata(got)
            continue
        if not 0 <= region.allocation < len(published.allocations):
            raise errors.bad_metadata(f"region {pool} in an allocation that is not published")
        nbytes = published.allocations[region.allocation].nbytes
        if region.nbytes < 0 or not 0 <= region.offset <= nbytes - region.nbytes:
            got = f"region {pool}, which is not inside its allocation of {nbytes:,} bytes"
            raise errors.bad_metadata(got)
