"""Offers that processes of one host see without asking: a board in shared memory.

A source posts what it offers, and takes it down before its blocks may be reused. A reader
that finds an offer on the board reads the blocks, and then looks again. The blocks were held
until after the last byte if two things are so then: the offer's generation is the one that
was there before, and the source's process has not begun to end. That is what a source
would confirm by a message, at the price of looking at memory.

Every slot has a generation, odd while an offer is posted. Whoever takes one down first makes
it even, and only then lets go of the blocks; whoever reads looks at it before and behind
everything else. What is posted carries a digest over itself and its generation, so that it
does not matter in which order another processor sees what was written.

A process is known by its number and the moment it was started, in one namespace of
processes, and a board by a token, for hosts number alike. A process that ends has no size any
more (the kernel's `statm`) from before any of its memory is given back, and its devices are
closed after that. Where the kernel says less, a reader asks by message.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
import struct
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError
from kvatlas.wire.transports.sealed_memory import make_sealed, map_sealed, watch_sealed
from kvatlas.wire.transports.watched_process import WatchedProcess

_SLOTS = 128
_SLOT_BYTES = 32 << 10
# Native: a number is read at once, and never half of one and half of the next.
_ROW, _NAME = struct.Struct("4q"), struct.Struct("q")
"""For each slot: generation, name, bytes and digest; and one of them."""
_HEAD_BYTES = 8192
"""Before the slots: their rows, the last mark that is known to be done, and a token."""
_BOARD_BYTES = _HEAD_BYTES + _SLOTS * _SLOT_BYTES

_TOKEN_AT, _TOKEN_BYTES = _SLOTS * _ROW.size + _NAME.size, 16
"""Where a board says which it is."""

Posting = tuple[int, int]
"""A slot, and the generation in which an offer was posted there."""

_MEMFD = "/memfd:kvatlas"
"""What the kernel calls a segment's descriptor."""


class PostedOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What a reader has to know of an offer."""

    request: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    blocks: dict[Annotated[int, msgspec.Meta(ge=0, le=65535)], bytes]
    """Block ids by group, each table as little-endian 32-bit integers."""
    start: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    stop: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    mark: Annotated[int, msgspec.Meta(ge=0, le=2**62)] | None


class BoardPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Where a board is: a descriptor of a process."""

    process: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    started: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    namespace: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    descriptor: Annotated[int, msgspec.Meta(ge=0, le=2**31)]
    token: Annotated[bytes, msgspec.Meta(min_length=_TOKEN_BYTES, max_length=_TOKEN_BYTES)]


# msgspec crashes where two threads are the first to decode a type: the first is this one.
_decoder = msgspec.msgpack.Decoder(PostedOffer)


class OfferBoard:
    """The board of one source; any thread may use it.

    >>> board = OfferBoard()
    >>> board.post(PostedOffer("request 17", {0: b""}, 0, 64, None))
    True
    >>> seen = PeerBoard(board.memory, None).find("request 17")
    >>> seen.offer.stop, seen.held
    (64, True)
    >>> board.take_down("request 17")
    >>> seen.held
    False
    >>> board.close()
    """

    _descriptor = -1

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._free = list(range(_SLOTS))
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._descriptor = make_sealed(_BOARD_BYTES)
        self.memory = map_sealed(self._descriptor)
        self._rows, self._done = _rows(self.memory), _done(self.memory)
        self._done[0] = -1
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self.memory[_TOKEN_AT : _TOKEN_AT + _TOKEN_BYTES] = self._token
        # Whoever leaves without closing gives its GPU's memory back before the kernel sees it end.
        weakref.finalize(self, _take_all_down, self._rows, self._process)

    @property
    def place(self) -> BoardPlace | None:
        """Where peers find it; None where the kernel does not say what they would look at."""
        namespace = _namespace()
        with suppress(OSError):
            own = WatchedProcess(os.getpid())
            if namespace is not None and own.alive:
                about = (os.getpid(), own.started, namespace)
                return BoardPlace(*about, self._descriptor, self._token)
        return None

    def post(self, offer: PostedOffer) -> bool:
        """Post an offer; whether there was room for it."""
        payload = msgspec.msgpack.encode(offer)
        with self._lock:
            if len(payload) > _SLOT_BYTES or not self._free or offer.request in self._slots:
                return False
            slot = self._slots[offer.request] = self._free.pop()
            at = _HEAD_BYTES + slot * _SLOT_BYTES
            self.memory[at : at + len(payload)] = payload
            generation = int(self._rows[slot, 0]) + 1
            digest = _digest(payload, generation)
            self._rows[slot, 1:] = _digest(offer.request.encode()), len(payload), digest
            self._rows[slot, 0] = generation
        return True

    def take_down(self, request: str) -> None:
        """Take an offer down, before its blocks are let go; nothing where it was not posted."""
        with self._lock:
            slot = self._slots.pop(request, None)
            if slot is not None and os.getpid() == self._process:
                self._rows[slot, 0] += 1
                self._free.append(slot)

    def tell_done(self, mark: int) -> None:
        """Let readers know that marks up to this one are done."""
        if os.getpid() == self._process:
            self._done[0] = mark

    def posting(self, request: str) -> Posting | None:
        """Where an offer is posted now, and for which time; None where it is not."""
        with self._lock:
            slot = self._slots.get(request)
            return None if slot is None else (slot, int(self._rows[slot, 0]))

    def close(self) -> None:
        """Take everything down."""
        for request in list(self._slots):
            self.take_down(request)
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
            self._free.clear()  # nothing is posted any more
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


class SeenOffer:
    """An offer that was found on a peer's board, to be looked at again."""

    def __init__(
        self, board: PeerBoard, offer: PostedOffer, posting: Posting, written: tuple[bytes, int]
    ) -> None:
        """`written` is what stood on the board, and the digest beside it."""
        self.offer, self.posting = offer, posting
        self._board, self._written = board, written
        self._slot, self._generation = posting

    @property
    def genuine(self) -> bool:
        """Whether it is what was posted, and not half of it and half of what was there before."""
        payload, digest = self._written
        return digest == _digest(payload, self._generation)

    @property
    def held(self) -> bool:
        """Whether it has been posted ever since, as far as the board says."""
        return self._board.generation(self._slot) == self._generation

    @property
    def confirmed(self) -> bool:
        """Whether the blocks are held at this moment, and have been since it was found."""
        return self._board.alive and self.held


class PeerBoard:
    """The board of a peer, which may write anything there."""

    def __init__(self, memory: mmap.mmap, process: WatchedProcess | None) -> None:
        """`process` is the peer's, with the board among its files; None where that is this one."""
        self._memory, self._process = memory, process

    @property
    def marks_done(self) -> int:
        """The last of the marks that its source knows to be done; -1 before there is any."""
        mark: int = _NAME.unpack_from(self._memory, _SLOTS * _ROW.size)[0]
        return mark

    @property
    def alive(self) -> bool:
        """Whether the process has not begun to end, and still is the program that has the board."""
        return self._process is None or self._process.alive

    def generation(self, slot: int) -> int:
        """The generation of a slot; odd where something is posted there."""
        generation: int = _NAME.unpack_from(self._memory, slot * _ROW.size)[0]
        return generation

    def find(self, request: str) -> SeenOffer | None:
        """An offer by its name; None where it is not there, is no offer, or its source has gone."""
        seen = (one for one in self._glimpses(request) if one.genuine and one.held)
        return next(seen, None) if self.alive else None

    def glimpse(self, request: str) -> SeenOffer | None:
        """What may be an offer of that name, as quickly as it can be seen.

        Whether it is `genuine`, and its source is there, who reads its blocks looks later.
        """
        name = _NAME.pack(_digest(request.encode()))
        at = self._memory.find(name, 0, _SLOTS * _ROW.size)
        if at < 0:
            return None
        seen = self._look_at(at // _ROW.size, request)  # mostly the only one
        return next(self._glimpses(request), None) if seen is None else seen

    def _glimpses(self, request: str) -> Iterator[SeenOffer]:
        for slot in self._slots_of(request):
            seen = self._look_at(slot, request)
            if seen is not None:
                yield seen

    def _look_at(self, slot: int, request: str) -> SeenOffer | None:
        """What a slot has, if that is an offer of this name."""
        generation, _, nbytes, digest = _ROW.unpack_from(self._memory, slot * _ROW.size)
        at = _HEAD_BYTES + slot * _SLOT_BYTES
        payload = self._memory[at : at + min(max(nbytes, 0), _SLOT_BYTES)]
        if not generation % 2:
            return None
        try:
            offer = _decoder.decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None
        if offer.request != request:
            return None
        return SeenOffer(self, offer, (slot, generation), (payload, digest))

    def _slots_of(self, request: str) -> Iterator[int]:
        """Slots whose name is a request's, found without a pass over all rows."""
        name = _NAME.pack(_digest(request.encode()))
        at = self._memory.find(name, 0, _SLOTS * _ROW.size)
        while at >= 0:
            slot, column = divmod(at, _ROW.size)
            if column == _NAME.size:  # the second number of a row
                yield slot
            at = self._memory.find(name, at + 1, _SLOTS * _ROW.size)

    def close(self) -> None:
        """Look no more."""
        if self._process is not None:
            self._process.close()


def open_board(place: BoardPlace) -> PeerBoard | None:
    """The board of a process of this host; None where it cannot be looked at from here."""
    if place.namespace != _namespace():
        return None
    path = Path(f"/proc/{place.process}/fd/{place.descriptor}")
    descriptor = -1
    try:
        if not str(path.readlink()).startswith(_MEMFD):  # nothing else is opened on a peer's word
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        memory = watch_sealed(descriptor, _BOARD_BYTES)
        process = WatchedProcess(place.process, path)
    except (OSError, AtlasError):
        return None
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    meant = memory[_TOKEN_AT : _TOKEN_AT + _TOKEN_BYTES] == place.token
    if meant and process.started == place.started and process.alive:
        return PeerBoard(memory, process)
    process.close()
    return None


def _take_all_down(rows: NDArray[np.int64], process: int) -> None:
    """Make every generation even, unless this is a process that was forked."""
    if os.getpid() == process:
        rows[:, 0] += rows[:, 0] % 2


def _namespace() -> int | None:
    """Names the namespace that numbers of processes are of."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return None


def _digest(payload: bytes, generation: int = 0) -> int:
    """Stands for some bytes of one generation in a slot's row."""
    salt = generation.to_bytes(8, "little", signed=True) if generation else b""
    digest = hashlib.blake2b(payload, digest_size=8, salt=salt).digest()
    return int.from_bytes(digest, "little", signed=True)


def _rows(memory: Any) -> NDArray[np.int64]:
    return np.frombuffer(memory, np.int64, 4 * _SLOTS).reshape(_SLOTS, 4)


def _done(memory: Any) -> NDArray[np.int64]:
    return np.frombuffer(memory, np.int64, 1, _SLOTS * _ROW.size)
