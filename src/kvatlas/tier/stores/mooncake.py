"""`MooncakeStore`: objects in Mooncake Store, which replicates, evicts and moves them.

Its answers are numbers below zero where something is wrong. That an object is not there, and
that there is no room, are answers; everything else, a master that is gone say, is a failure.

A call of its client polls until all bytes have moved, which other threads of it see to. So calls
that move bytes are made by threads that leave the processor to those.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait as wait_for
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException
from typing import Any, ClassVar

import numpy as np

from kvatlas.errors import AtlasError, Code, MissingExtraError
from kvatlas.tier.store_calls import Deadline, StoreCalls
from kvatlas.tier.stores.base import ABSENT, ObjectStore, Parts, StoreRoom
from kvatlas.wire.run_bounds import Bytes

_NOT_STORED = (-10, -200, -800)
"""No segment, no room, or a segment whose host cannot be reached."""
_ABSENT = (-703, -704, -707)
"""An object that is being written, is not there, or could be evicted while it was read."""
_UNLIKE_SIZE = (-600, -800)
"""The memory for an object has not its size, or the object cannot be moved."""
_KEPT = (-705,)
"""An object that is there already."""
_TURN = 0.5
"""Seconds that a call waits for another to have moved its bytes: that one may hang."""
_MOVERS = 4
"""Threads that move bytes: one does, and others where it hangs."""
_POLLING = 5
"""How far threads that poll stand back, as `nice` counts it: a quarter of a core is theirs."""
_SECONDS = 3.0
"""That the master may take to be reached, or to list what it has."""


class MooncakeStore(ObjectStore):
    """A client of a master: `MooncakeStore("127.0.0.1:50051")`.

    `segment` bytes of this host's memory join the store, 0 for none; `buffer` bytes are
    the client's own, for what is not in registered memory. `metrics` is the address of the
    master's web pages, which list what there is.
    """

    calls_at_once: ClassVar[int] = 2
    """One moves bytes while another's are summed, or names are asked for."""

    def __init__(
        self,
        master: str,
        *,
        host: str = "127.0.0.1",
        protocol: str = "tcp",
        device: str = "",
        metadata: str = "P2PHANDSHAKE",
        segment: int = 0,
        buffer: int = 16 << 20,
        metrics: str = "",
    ) -> None:
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError:
            raise MissingExtraError("mooncake", "mooncake") from None
        self.master, self._metrics = master, metrics
        self._client: Any = MooncakeDistributedStore()
        self._memory: list[Bytes] = []
        self._moving = threading.Lock()
        self._check_master()
        answer = self._client.setup(host, metadata, segment, buffer, protocol, device, master)
        if answer:
            raise self._failed("setup", answer)
        self._movers = StoreCalls(_MOVERS, nice=_POLLING)

    @property
    def client(self) -> Any:
        """Mooncake's own client, for what is not asked of a store."""
        return self._client

    def _check_master(self) -> None:
        """Refuse a master that is not there: the client would try for minutes."""
        host, _, port = self.master.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _SECONDS).close()
        except (OSError, ValueError) as problem:
            raise self._failed("connect", problem) from None

    def register(self, memory: Bytes) -> None:
        """Have the client know memory that objects go from and to."""
        answer = self._client.register_buffer(memory.ctypes.data, memory.nbytes)
        if answer:
            raise self._failed("register_buffer", answer)
        self._memory.append(memory)

    def put(self, objects: Sequence[tuple[str, Parts]]) -> list[bool]:
        """Store objects that are not there yet."""
        if not objects:
            return []
        answers = self._move(self._client.batch_put_from_multi_buffers, objects)
        return [self._answer("put", answer, _NOT_STORED, _KEPT) for answer in answers]

    def get(self, objects: Sequence[tuple[str, Parts]]) -> list[int]:
        """Read whole objects."""
        if not objects:
            return []
        answers = self._move(self._client.batch_get_into_multi_buffers, objects)
        found = []
        for (name, parts), answer in zip(objects, answers, strict=True):
            size = self.size(name) if answer in _UNLIKE_SIZE else answer
            if answer in _UNLIKE_SIZE and size == sum(part.nbytes for part in parts):
                raise self._failed("get", answer)  # its size is right: it could not be moved
            found.append(size if self._answer("get", size, (ABSENT, *_ABSENT)) else ABSENT)
        return found

    def ranges(self, name: str, wanted: Sequence[tuple[int, Bytes]]) -> int:
        """Read parts of an object."""
        size = self.size(name)
        if size == ABSENT:
            return ABSENT
        between = np.empty(max(into.nbytes for _, into in wanted), np.uint8)
        self._client.register_buffer(between.ctypes.data, between.nbytes)
        try:
            return sum(self._range(name, at, into, size, between) for at, into in wanted)
        finally:
            self._client.unregister_buffer(between.ctypes.data)

    def _range(self, name: str, at: int, into: Bytes, size: int, between: Bytes) -> int:
        """Read a part of an object, as far as it goes, by memory that the client knows."""
        nbytes = min(into.nbytes, size - at)
        if nbytes <= 0:
            return 0
        place = between.ctypes.data
        read = self._client.get_into_ranges([place], [[name]], [[[0]]], [[[at]]], [[[nbytes]]])
        if read != [[[nbytes]]]:
            raise self._failed("get_into_ranges", read)
        into[:nbytes] = between[:nbytes]
        return nbytes

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Which objects are there."""
        if not names:
            return []
        answers = self._client.batch_is_exist(list(names))
        return [self._answer("exists", answer, _ABSENT) and answer == 1 for answer in answers]

    def remove(self, names: Sequence[str]) -> int:
        """Remove objects."""
        if not names:
            return 0
        answers = self._client.batch_remove(list(names), True)
        return sum(self._answer("remove", answer, _ABSENT) for answer in answers)

    def remove_all(self, prefix: str) -> int:
        """Remove all whose names begin so."""
        removed = self._client.remove_by_regex("^" + re.escape(prefix) + ".*", True)
        return int(removed) if self._answer("remove", removed) else 0

    def names(self, prefix: str = "") -> Iterator[str]:
        """The names that begin so."""
        for name in self._page("get_all_keys").splitlines():
            if name.startswith(prefix):
                yield name

    def size(self, name: str) -> int:
        """The bytes of an object."""
        answer = self._client.get_size(name)
        return int(answer) if self._answer("size", answer, _ABSENT) else ABSENT

    def sweep(self) -> int:
        """The master itself forgets what was never finished."""
        return 0

    def capacity(self) -> StoreRoom:
        """What there is and what could be."""
        figures = {}
        for line in self._page("metrics").splitlines():
            name, _, value = line.partition(" ")
            if re.fullmatch(r"[0-9]{1,20}(\.[0-9]+)?(e\+?[0-9]{1,2})?", value):
                figures[name] = int(float(value))
        used, total = "master_allocated_bytes", "master_total_capacity_bytes"
        objects = figures.get("master_key_count", 0)
        return StoreRoom(figures.get(used, 0), figures.get(total, 0), objects)

    def close(self) -> None:
        """Leave the store, with the memory that this host gave to it."""
        if not self._movers.close(Deadline(_SECONDS)):
            return  # a call hangs in the client, and in memory that it was told of
        for memory in self._memory:
            self._client.unregister_buffer(memory.ctypes.data)
        self._memory = []
        self._client.close()

    def _move(self, call: Callable[..., Any], objects: Sequence[tuple[str, Parts]]) -> Any:
        """Have a thread that stands back call the client, while no other does.

        The thread keeps the memory of the objects, and who is interrupted here keeps the turn:
        the client goes on.
        """
        about = self._listed(objects)
        with self._turn():
            started = self._movers.start(lambda: (call(*about), objects)[0])
            try:
                return started.result()
            except BaseException:
                wait_for([started], _TURN)
                raise

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Move bytes while no other call does: two at once cost more, and take longer."""
        alone = self._moving.acquire(timeout=_TURN)
        try:
            yield
        finally:
            if alone:
                self._moving.release()

    def _listed(
        self, objects: Sequence[tuple[str, Parts]]
    ) -> tuple[list[str], list[list[int]], list[list[int]]]:
        """Names, addresses and sizes, as the client takes them."""
        return (
            [name for name, _ in objects],
            [[part.ctypes.data for part in parts] for _, parts in objects],
            [[part.nbytes for part in parts] for _, parts in objects],
        )

    def _answer(
        self, call: str, answer: int, no: tuple[int, ...] = (), yes: tuple[int, ...] = ()
    ) -> bool:
        """Whether an answer is yes or no; refused where it is neither."""
        if answer >= 0 or answer in yes:
            return True
        if answer in no:
            return False
        raise self._failed(call, answer)

    def _page(self, name: str) -> str:
        if not self._metrics:
            problem = "Mooncake's master lists what it has on its web pages alone"
            hint = "Name their address: mooncake://host:port?metrics=host:9003"
            raise AtlasError(Code.WIRE_FAILED, problem, got=f"master {self.master}", hint=hint)
        try:
            with closing(HTTPConnection(self._metrics, timeout=_SECONDS)) as connection:
                connection.request("GET", f"/{name}")
                return connection.getresponse().read().decode()
        except (OSError, ValueError, HTTPException) as problem:
            hint = "See that the master runs, and where its metrics_port is"
            got = f"{self._metrics}/{name}: {problem}"
            raise AtlasError(Code.WIRE_FAILED, got=got, hint=hint) from None

    def _failed(self, call: str, answer: object) -> AtlasError:
        problem = "Mooncake Store does not answer as it should"
        got = f"{call}: {answer} from master {self.master}"
        return AtlasError(Code.WIRE_FAILED, problem, got=got, hint="See that its master runs")
