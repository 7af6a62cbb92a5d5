"""Offer board: shared memory in which processes on one host see offers without asking.

A source posts its offers, and takes an offer down before its blocks may be reused. A reader that
finds an offer reads the blocks and then checks the board again. If the offer's generation is
unchanged and the source's process has not begun to exit, the source held the blocks until the last
byte was read. So a memory read replaces a confirmation by message.

Every slot has a generation, which is odd while an offer is posted. To take an offer down, the
source first makes the generation even, and only then releases the blocks. A reader checks the
generation before and after everything else. Each posting contains a digest of its content and
generation, so the order in which another processor sees the writes does not matter.

A process is identified by its pid and start time within one pid namespace. A board also has a
random token, because different hosts use the same pids. When a process exits, the kernel first
reports 0 as the size of the process (`statm`). Only then does the kernel free the memory of the
process and close its devices. If the kernel does not report this, readers ask by message.
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
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvatlas.errors import AtlasError
from kvatlas.wire.transports.shared_memory import make_sealed, map_sealed, watch_sealed
from kvatlas.wire.transports.watched_process import WatchedProcess

_SLOTS = 128
_SLOT_BYTES = 32 << 10
# Native byte order and alignment: the CPU reads each number atomically.
_ROW, _NAME = struct.Struct("4q"), struct.Struct("q")
"""The layouts of a slot's header and of one number.

The header contains the generation, a digest of the name, the content's size, and its digest.
"""
_HEAD_BYTES = 8192
"""The bytes before the contents: the slots' headers, the last completed mark, and the token."""
_BOARD_BYTES = _HEAD_BYTES + _SLOTS * _SLOT_BYTES

_TOKEN_AT, _TOKEN_BYTES = _SLOTS * _ROW.size + _NAME.size, 16
"""The offset of the board's token."""

Posting = tuple[int, int]
"""A slot, and the generation in which an offer was posted there."""

_MEMFD = "/memfd:kvatlas"
"""The start of the target of the symbolic link `/proc/PID/fd/N` for a board's descriptor."""


class PostedOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The parts of an offer that a reader needs."""

    request: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    blocks: dict[Annotated[int, msgspec.Meta(ge=0, le=65535)], bytes]
    """Block ids by group, each table as little-endian 32-bit integers."""
    start: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    stop: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    mark: Annotated[int, msgspec.Meta(ge=0, le=2**62)] | None


class BoardPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The location of a board: a process (pid and start time), and a file descriptor in it."""

    process: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    started: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    namespace: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    descriptor: Annotated[int, msgspec.Meta(ge=0, le=2**31)]
    token: Annotated[bytes, msgspec.Meta(min_length=_TOKEN_BYTES, max_length=_TOKEN_BYTES)]


# Made at import: msgspec crashes if two threads decode a type for the first time concurrently.
_decoder = msgspec.msgpack.Decoder(PostedOffer)


class OfferBoard:
    """The board on which one source posts its offers. Any thread may use it.

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
        numbers = np.frombuffer(self.memory, np.int64, 4 * _SLOTS + 1)
        self._rows, self._done = numbers[:-1].reshape(_SLOTS, 4), numbers[-1:]
        self._done[0] = -1
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self.memory[_TOKEN_AT : _TOKEN_AT + _TOKEN_BYTES] = self._token
        # At exit without close(), the GPU's memory is freed before the kernel reports the exit.
        weakref.finalize(self, _take_all_down, self._rows, self._process)

    @property
    def place(self) -> BoardPlace | None:
        """The location of the board for peers.

        None if the kernel does not report whether this process has begun to exit.
        """
        namespace = _namespace()
        with suppress(OSError):
            own = WatchedProcess(os.getpid())
            if namespace is not None and own.alive:
                about = (os.getpid(), own.started, namespace)
                return BoardPlace(*about, self._descriptor, self._token)
        return None

    def post(self, offer: PostedOffer) -> bool:
        """Post an offer. Return False if it does not fit, or the request is already posted."""
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
        """Take an offer down before its blocks are released. No effect if it was not posted."""
        with self._lock:
            slot = self._slots.pop(request, None)
            if slot is not None and os.getpid() == self._process:
                self._rows[slot, 0] += 1
                self._free.append(slot)

    def tell_done(self, mark: int) -> None:
        """Publish that all GPU events up to and including number `mark` have completed."""
        if os.getpid() == self._process:
            self._done[0] = mark

    def posting(self, request: str) -> Posting | None:
        """Return (slot, generation) of a request's offer; None if no offer is posted."""
        with self._lock:
            slot = self._slots.get(request)
            return None if slot is None else (slot, int(self._rows[slot, 0]))

    def close(self) -> None:
        """Take all offers down, and close the board."""
        for request in list(self._slots):
            self.take_down(request)
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
            self._free.clear()  # so that nothing more is posted
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


class SeenOffer:
    """An offer that was found on a peer's board, to be checked again later."""

    def __init__(
        self, board: PeerBoard, offer: PostedOffer, posting: Posting, written: tuple[bytes, int]
    ) -> None:
        """Store an offer. `written` is the encoded offer and its digest, as read from the board."""
        self.offer, self.posting = offer, posting
        self._board, self._written = board, written
        self._slot, self._generation = posting

    @property
    def genuine(self) -> bool:
        """Whether the content matches its digest, so that it is not a mix of two postings."""
        payload, digest = self._written
        return digest == _digest(payload, self._generation)

    @property
    def held(self) -> bool:
        """Whether the offer has stayed on the board since this object read it."""
        return self._board.generation(self._slot) == self._generation

    @property
    def confirmed(self) -> bool:
        """Whether the source is alive and has held the blocks since the offer was found."""
        return self._board.alive and self.held


class PeerBoard:
    """The board of a peer. Its content is not trusted."""

    def __init__(self, memory: mmap.mmap, process: WatchedProcess | None) -> None:
        """Read the board in `memory`. `process` is its owner; None for a board of this process."""
        self._memory, self._process = memory, process

    @property
    def marks_done(self) -> int:
        """The number of the last GPU event that the source published as completed; -1 if none."""
        mark: int = _NAME.unpack_from(self._memory, _SLOTS * _ROW.size)[0]
        return mark

    @property
    def alive(self) -> bool:
        """Whether the peer's process has the board open and has not begun to exit."""
        return self._process is None or self._process.alive

    def generation(self, slot: int) -> int:
        """Return the generation of a slot, which is odd while an offer is posted."""
        generation: int = _NAME.unpack_from(self._memory, slot * _ROW.size)[0]
        return generation

    def find(self, request: str) -> SeenOffer | None:
        """Return a request's offer; None if it is missing or invalid, or the source has exited."""
        seen = (one for one in self._glimpses(request) if one.genuine and one.held)
        return next(seen, None) if self.alive else None

    def glimpse(self, request: str) -> SeenOffer | None:
        """Return the offer of a request as quickly as possible, without checks.

        The caller must check later that it is `genuine` and `confirmed`.
        """
        return next(self._glimpses(request), None)

    def _glimpses(self, request: str) -> Iterator[SeenOffer]:
        """Yield the offers of a request.

        Only slots that contain the digest of the request's name are decoded.
        """
        name = _NAME.pack(_digest(request.encode()))
        at = self._memory.find(name, 0, _SLOTS * _ROW.size)
        while at >= 0:
            slot, column = divmod(at, _ROW.size)
            if column == _NAME.size:  # the second number of a row
                seen = self._look_at(slot, request)
                if seen is not None:
                    yield seen
            at = self._memory.find(name, at + 1, _SLOTS * _ROW.size)

    def _look_at(self, slot: int, request: str) -> SeenOffer | None:
        """Return the offer in a slot if it is for this request, otherwise None."""
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

    def close(self) -> None:
        """Stop watching the peer's process."""
        if self._process is not None:
            self._process.close()


def open_board(place: BoardPlace) -> PeerBoard | None:
    """Open the board of a process on this host. Return None if it cannot be accessed."""
    if place.namespace != _namespace():
        return None
    path = Path(f"/proc/{place.process}/fd/{place.descriptor}")
    descriptor = -1
    try:
        # A peer's metadata must not make this process open other files.
        if not str(path.readlink()).startswith(_MEMFD):
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
    """Take all offers down by making every generation even.

    Forked children must not change the board. The call therefore has no effect unless `process` is
    this process's pid.
    """
    if os.getpid() == process:
        rows[:, 0] += rows[:, 0] % 2


def _namespace() -> int | None:
    """Return the inode of this process's pid namespace; None if it is not available."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return None


def _digest(payload: bytes, generation: int = 0) -> int:
    """Return a 64-bit digest of `payload` and a generation."""
    salt = generation.to_bytes(8, "little", signed=True) if generation else b""
    digest = hashlib.blake2b(payload, digest_size=8, salt=salt).digest()
    return int.from_bytes(digest, "little", signed=True)
