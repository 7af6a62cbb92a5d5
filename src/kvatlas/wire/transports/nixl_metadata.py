"""Agent metadata of NIXL, disassembled for sending and validated on arrival.

NIXL and UCX trust metadata: a wrong memory type or version in it crashes the process that reads it.
So an agent's metadata is not sent as it is. Only the agent's address, its regions (which must match
the handshake) and one key per region are sent. The receiver checks the form of the address and the
keys, and rebuilds the rest itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvatlas.copying.memory import Memory
from kvatlas.wire.transports import errors, ucx_forms
from kvatlas.wire.transports.offer_board import BoardPlace

Kind = Literal["DRAM", "VRAM"]

_KINDS: dict[Kind, int] = {"DRAM": 0, "VRAM": 1}
"""NIXL's codes for memory kinds."""
_UCX_MEMORY: dict[Kind, set[int]] = {"DRAM": {0}, "VRAM": {1, 2, 3, 4}}
"""UCX's codes for memory kinds: 0 is the host; 1 to 4 are CUDA, ROCm and their managed memory."""
_MAX_ADDRESS = 16 << 10
_UCX_MARGIN = bytes(256)
"""Padding after an address, because UCX may read a few bytes past its end."""
_ROW = 24
"""The number of bytes in which NIXL encodes a region's address, length and device."""


class KeyedRegion(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A region and its key. The fields are in the order by which NIXL sorts regions."""

    device: Annotated[int, Meta(ge=0, lt=1 << 32)]
    address: Annotated[int, Meta(ge=0)]
    nbytes: Annotated[int, Meta(ge=0)]
    key: bytes

    @property
    def place(self) -> tuple[int, int, int]:
        """(address, size in bytes, device index) of the region."""
        return self.address, self.nbytes, self.device

    @property
    def row(self) -> bytes:
        """The region and its key in NIXL's encoding."""
        return _row(*self.place) + self.key


class Published(msgspec.Struct, tag="nixl", forbid_unknown_fields=True):
    """The published metadata: the agent's address and its regions."""

    agent: Annotated[str, Meta(pattern=r"\Akvatlas-[0-9a-f]{32}\Z")]
    kind: Kind
    address: Annotated[bytes, Meta(min_length=1, max_length=_MAX_ADDRESS)]
    regions: dict[int, KeyedRegion]
    board: BoardPlace | None = None
    """The location of the offer board, for processes on the same host."""


def take_apart(
    metadata: bytes, agent: str, kind: Kind, backend: str, memory: Mapping[int, Memory]
) -> Published:
    """Return the parts of this process's agent metadata that are sent to peers."""
    address, at = _field_at(metadata, len(_head(agent, backend)), "c")
    at += len(_section(kind, backend, len({_place(region) for region in memory.values()})))
    keys = {}
    while at < len(metadata):
        row, at = _field_at(metadata, at, "")
        keys[row[:_ROW]] = row[_ROW:]
    regions = {
        pool: KeyedRegion(at.number, at.address, at.nbytes, keys.get(_row(*_place(at)), b""))
        for pool, at in memory.items()
    }
    published = Published(agent, kind, address, regions)
    # The positions of the fields were assumed, not checked: this checks every byte.
    if _joined(published, backend, b"") != metadata:
        hint = "Install a version of nixl that kvatlas is tested with"
        problem = "This version of NIXL is not supported"
        raise errors.failed("agent metadata in an unknown format", hint, problem)
    return published


def put_together(published: Published, backend: str) -> bytes:
    """Return an agent's metadata in NIXL's encoding, rebuilt from its parts."""
    return _joined(published, backend, _UCX_MARGIN if backend == "UCX" else b"")


def _joined(published: Published, backend: str, margin: bytes) -> bytes:
    rows = sorted(
        set(published.regions.values()), key=lambda at: (at.device, at.address, at.nbytes)
    )
    return b"".join((
        _head(published.agent, backend),
        _field("c", published.address + margin),
        _section(published.kind, backend, len(rows)),
        *(_field("", region.row) for region in rows),
    ))  # fmt: skip


def check(published: Published, backend: str, memory: Mapping[int, Memory]) -> None:
    """Raise `bad_handshake` for metadata that an agent with these regions cannot publish."""
    told = {pool: region.place for pool, region in published.regions.items()}
    known = {pool: _place(at) for pool, at in memory.items()}
    if told != known:
        unlike = sorted(pool for pool in told | known if told.get(pool) != known.get(pool))
        got = f"another address, size or device of regions {unlike[:8]} than in the handshake"
        raise errors.bad_metadata(got)
    for pool, (address, nbytes, _) in known.items():
        if address + nbytes >= 1 << 64:
            raise errors.bad_metadata(f"region {pool}, whose address or size is too large")
    if backend != "UCX":
        return
    if not ucx_forms.is_address(published.address):
        raise errors.bad_metadata(f"an invalid UCX address of {len(published.address)} bytes")
    for pool, region in published.regions.items():
        if not ucx_forms.is_key(region.key, _UCX_MEMORY[published.kind]):
            got = f"an invalid UCX key of {len(region.key)} bytes for region {pool}"
            raise errors.bad_metadata(got)


def _head(agent: str, backend: str) -> bytes:
    fields = ("Agent", agent.encode()), ("Conns", _number(1)), ("t", backend.encode())
    return b"nixlSerDes|" + b"".join(_field(tag, value) for tag, value in fields)


def _section(kind: Kind, backend: str, rows: int) -> bytes:
    """Return the part of the metadata between an agent's address and its regions."""
    head = _field("", b"MemSection") + _field("nixlSecElms", _number(1 if rows else 0))
    if not rows:
        return head
    fields = (
        ("bknd", backend.encode()),
        ("nixlDList", b"nixlSDList"),
        ("t", _KINDS[kind].to_bytes(4, "little")),
        ("n", _number(rows)),
    )
    return head + b"".join(_field(tag, value) for tag, value in fields)


def _place(at: Memory) -> tuple[int, int, int]:
    return at.address, at.nbytes, at.number


def _row(*place: int) -> bytes:
    return b"".join(map(_number, place))


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _field(tag: str, value: bytes) -> bytes:
    return tag.encode() + _number(len(value)) + value + b"|"


def _field_at(metadata: bytes, at: int, tag: str) -> tuple[bytes, int]:
    """Return (value of the field at offset `at`, offset after the field)."""
    start = at + len(tag) + 8
    stop = start + int.from_bytes(metadata[start - 8 : start], "little")
    return metadata[start:stop], stop + 1
