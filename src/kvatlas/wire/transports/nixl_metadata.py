"""What NIXL agents tell each other, taken apart and put together again.

NIXL and UCX trust what they are told: a wrong memory type or version in it ends the
process that reads it. So an agent's metadata does not travel. What travels are its
regions, which have to be those of the handshake, and the two things that only the peer's
libraries know: its address, and a key for each region. Those are held to the form that
UCX gives them; all else is put in by the end that connects.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from kvatlas.wire.transports import errors, ucx_forms
from kvatlas.wire.transports.base import Memory
from kvatlas.wire.transports.offer_board import BoardPlace

Kind = Literal["DRAM", "VRAM"]

AGENT = re.compile(r"kvatlas-[0-9a-f]{32}")
_KINDS: dict[Kind, int] = {"DRAM": 0, "VRAM": 1}
"""NIXL's numbers for where memory is."""
_UCX_MEMORY: dict[Kind, set[int]] = {"DRAM": {0}, "VRAM": {1, 2, 3, 4}}
"""UCX's numbers for the same: the host's; CUDA's, ROCm's, and what they manage."""
_MAX_ADDRESS = 16 << 10
_UCX_MARGIN = bytes(256)
"""Put behind an address, for who takes a part of it for longer than it says it is."""
_ROW = 24
"""Bytes of a region's address, length and device."""


class KeyedRegion(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A region as an agent knows it, in the order of its lists, and the key to it."""

    device: int
    address: int
    nbytes: int
    key: bytes

    @property
    def row(self) -> bytes:
        """How NIXL writes it."""
        return _row(self.address, self.nbytes, self.device) + self.key


class Published(msgspec.Struct, tag="nixl", forbid_unknown_fields=True):
    """What a peer's libraries need: where its agent is, and its regions."""

    agent: str
    kind: Kind
    address: bytes
    regions: dict[int, KeyedRegion]
    board: BoardPlace | None = None
    """Where processes of the same host see what it offers."""


def take_apart(
    metadata: bytes, agent: str, kind: Kind, backend: str, memory: Mapping[int, Memory]
) -> Published:
    """What is to travel of this process's own agent's metadata."""
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
    """An agent's metadata, as it was before it was taken apart."""
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
    """Refuse what no agent of a peer with these regions can have published."""
    if not AGENT.fullmatch(published.agent):
        raise errors.bad_metadata(f"an agent named {published.agent[:64]!r}")
    for pool, at in memory.items():
        region = published.regions.get(pool)
        if region is None or (region.address, region.nbytes, region.device) != _place(at):
            raise errors.bad_metadata(f"region {pool} that is not the one of the handshake")
    if len(published.regions) > len(memory):
        raise errors.bad_metadata("regions that the handshake does not name")
    for at in memory.values():
        inside = min(_place(at)) >= 0 and at.address + at.nbytes < 1 << 64 and at.number < 1 << 32
        if not inside:
            raise errors.bad_metadata("a region past the end of memory")
    if not 0 < len(published.address) <= _MAX_ADDRESS:
        raise errors.bad_metadata(f"an address of {len(published.address)} bytes")
    if backend == "UCX":
        _check_ucx(published)


def _check_ucx(published: Published) -> None:
    if not ucx_forms.is_address(published.address):
        raise errors.bad_metadata(f"{len(published.address)} bytes that are no address of UCX")
    for region in published.regions.values():
        if not ucx_forms.is_key(region.key, _UCX_MEMORY[published.kind]):
            raise errors.bad_metadata(f"{len(region.key)} bytes that are no key of UCX")


def _head(agent: str, backend: str) -> bytes:
    fields = ("Agent", agent.encode()), ("Conns", _number(1)), ("t", backend.encode())
    return b"nixlSerDes|" + b"".join(_field(tag, value) for tag, value in fields)


def _section(kind: Kind, backend: str, rows: int) -> bytes:
    """What stands between an agent's address and its regions."""
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
    return errors.failed("metadata of NIXL in a form that is not known", hint=hint)
