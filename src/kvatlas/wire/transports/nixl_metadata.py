"""Agent metadata of NIXL, disassembled for sending and validated on arrival.

NIXL and UCX trust metadata: a wrong memory type or version in it crashes the process that reads it.
So an agent's metadata is not sent as it is. Only its regions, which must match the handshake, its
address, and one key per region are sent. The receiver checks that address and keys have the form
that UCX gives them, and fills in everything else itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from kvatlas.copying.memory import Memory
from kvatlas.wire.transports import errors, ucx_forms
from kvatlas.wire.transports.offer_board import BoardPlace

Kind = Literal["DRAM", "VRAM"]

AGENT = re.compile(r"kvatlas-[0-9a-f]{32}")
_KINDS: dict[Kind, int] = {"DRAM": 0, "VRAM": 1}
"""NIXL's codes for memory kinds."""
_UCX_MEMORY: dict[Kind, set[int]] = {"DRAM": {0}, "VRAM": {1, 2, 3, 4}}
"""UCX's codes for memory kinds: host; CUDA, ROCm, and their managed memory."""
_MAX_ADDRESS = 16 << 10
_UCX_MARGIN = bytes(256)
"""Padding after an address, because some readers take a part of it for longer than it is."""
_ROW = 24
"""The size of a region's address, length and device in bytes."""


class KeyedRegion(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A region in the order of the agent's lists, with its key."""

    device: int
    address: int
    nbytes: int
    key: bytes

    @property
    def row(self) -> bytes:
        """The region as NIXL writes it."""
        return _row(self.address, self.nbytes, self.device) + self.key


class Published(msgspec.Struct, tag="nixl", forbid_unknown_fields=True):
    """The published metadata: the agent's address and its regions."""

    agent: str
    kind: Kind
    address: bytes
    regions: dict[int, KeyedRegion]
    board: BoardPlace | None = None
    """Where processes on the same host find its offer board."""


def take_apart(
    metadata: bytes, agent: str, kind: Kind, backend: str, memory: Mapping[int, Memory]
) -> Published:
    """Extract the parts to send from this process's agent metadata."""
    reader = _Reader(metadata)
    reader.skip(_head(agent, backend))
    address = reader.field("c")
    keys = {}
    if memory:
        reader.skip(_section(kind, backend, len({_place(at) for at in memory.values()})))
        while not reader.at_end:
            row = reader.field("")
            keys[row[:_ROW]] = row[_ROW:]
    regions = {
        pool: KeyedRegion(at.number, at.address, at.nbytes, keys.get(_row(*_place(at)), b""))
        for pool, at in memory.items()
    }
    published = Published(agent, kind, address, regions)
    if _joined(published, backend, b"") != metadata:
        raise _unknown_form()
    return published


def put_together(published: Published, backend: str) -> bytes:
    """Rebuild an agent's metadata from its parts."""
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
    """Raise an error for metadata that no agent with these regions can have published."""
    if not AGENT.fullmatch(published.agent):
        raise errors.bad_metadata(f"an agent named {published.agent[:64]!r}")
    for pool, at in memory.items():
        region = published.regions.get(pool)
        if region is None or (region.address, region.nbytes, region.device) != _place(at):
            raise errors.bad_metadata(f"region {pool}, which does not match the handshake")
    if len(published.regions) > len(memory):
        raise errors.bad_metadata("regions that are not in the handshake")
    for at in memory.values():
        inside = min(_place(at)) >= 0 and at.address + at.nbytes < 1 << 64 and at.number < 1 << 32
        if not inside:
            raise errors.bad_metadata("a region outside the address space")
    if not 0 < len(published.address) <= _MAX_ADDRESS:
        raise errors.bad_metadata(f"an address of {len(published.address)} bytes")
    if backend == "UCX":
        _check_ucx(published)


def _check_ucx(published: Published) -> None:
    if not ucx_forms.is_address(published.address):
        raise errors.bad_metadata(f"{len(published.address)} bytes that are not a UCX address")
    for region in published.regions.values():
        if not ucx_forms.is_key(region.key, _UCX_MEMORY[published.kind]):
            raise errors.bad_metadata(f"{len(region.key)} bytes that are not a UCX key")


def _head(agent: str, backend: str) -> bytes:
    fields = ("Agent", agent.encode()), ("Conns", _number(1)), ("t", backend.encode())
    return b"nixlSerDes|" + b"".join(_field(tag, value) for tag, value in fields)


def _section(kind: Kind, backend: str, rows: int) -> bytes:
    """Return the section between an agent's address and its regions."""
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


class _Reader:
    """Fields of this process's own metadata, one after the other."""

    def __init__(self, metadata: bytes) -> None:
        self._rest = metadata

    @property
    def at_end(self) -> bool:
        return not self._rest

    def skip(self, known: bytes) -> None:
        if not self._rest.startswith(known):
            raise _unknown_form()
        self._rest = self._rest[len(known) :]

    def field(self, tag: str) -> bytes:
        self.skip(tag.encode())
        length = int.from_bytes(self._rest[:8], "little")
        value = self._rest[8 : 8 + length]
        self.skip(_number(length) + value + b"|")
        return value


def _unknown_form() -> Exception:
    hint = "Install a version of nixl that kvatlas is tested with"
    problem = "This version of NIXL is not supported"
    return errors.failed("agent metadata of unknown form", hint, problem)
