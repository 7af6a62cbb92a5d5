"""`MooncakeStore`: objects in Mooncake Store, which replicates, evicts and moves them.

Its client reports problems as negative numbers. An absent object and a lack of space are normal
results. Everything else, such as an unreachable master, is an error.

A call of the client polls until its worker threads have moved all bytes. Calls that move bytes
therefore run in threads of low priority, which leave the processor to the workers.
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

from kvatlas.copying.run_bounds import Bytes
from kvatlas.errors import AtlasError, Code, MissingExtraError
from kvatlas.geometry.integers import positive
from kvatlas.tier.store_calls import Deadline, StoreCalls
from kvatlas.tier.stores.base import ABSENT, ObjectStore, Parts, StoreRoom

_NOT_STORED = (-10, -200, -800)
"""Codes of a failed put: no segment, no space, or a segment whose host cannot be reached."""
_ABSENT = (-703, -704, -707)
"""Codes of an object that is being written, is absent, or may have been evicted during a read."""
_UNLIKE_SIZE = (-600, -800)
"""Codes of a failed get: the memory and the object differ in size, or the transfer failed."""
_KEPT = (-705,)
"""The code of a put whose object already exists."""
_TURN = 0.5
"""Maximum number of seconds that a call waits for the previous call, which may hang."""
_MOVERS = 4
"""Number of threads that move bytes. Normally one is used; the others replace hanging ones."""
_POLLING = 5
"""The `nice` value of polling threads, which limits them to about a quarter of a core."""
_SECONDS = 3.0
"""Timeout for connecting to the master and for listing its objects."""


class MooncakeStore(ObjectStore):
    """A client of a Mooncake master: `MooncakeStore("127.0.0.1:50051")`.

    The client contributes `segment` bytes of this host's memory to the store, and uses `buffer`
    bytes for objects outside registered memory. `metrics` is the address of the master's metrics
    server, which lists the objects. Each object is stored in the memory of `replicas` clients that
    contribute a segment, or of all such clients if there are fewer.
    """

    removes_by_prefix: ClassVar[bool] = False
    """The master compares the name of every object with a prefix."""

    calls_at_once: ClassVar[int] = 2
    """One call moves bytes while another computes checksums or looks up names."""

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
        replicas: int = 1,
    ) -> None:
        try:
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig
        except ImportError:
            raise MissingExtraError("mooncake", "mooncake") from None
        self.master, self._metrics = master, metrics
        self._client: Any = MooncakeDistributedStore()
        self._how = ReplicateConfig()
        self._how.replica_num = positive(replicas, "the number of replicas")
        self._memory: list[Bytes] = []
        self._moving = threading.Lock()
        self._check_master()
        answer = self._client.setup(host, metadata, segment, buffer, protocol, device, master)
        if answer:
            raise self._failed("setup", answer)
        self._movers = StoreCalls(_MOVERS, nice=_POLLING)

    @property
    def client(self) -> Any:
        """Mooncake's client, for calls that are not part of `ObjectStore`."""
        return self._client

    def _check_master(self) -> None:
        """Raise an error if the master cannot be reached. The client would retry for minutes."""
        host, _, port = self.master.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _SECONDS).close()
        except OSError as fault:
            problem = "The Mooncake master cannot be reached"
            hint = "Check its address, and that the master is running"
            got = f"{self.master}: {fault}"
            raise AtlasError(Code.WIRE_FAILED, problem, got=got, hint=hint) from None
        except ValueError:
            problem = "The address of a Mooncake master must contain a host and a port"
            hint = "Use an address such as mooncake://127.0.0.1:50051"
            raise AtlasError(Code.WIRE_FAILED, problem, got=repr(self.master), hint=hint) from None

    def register(self, memory: Bytes) -> None:
        """Register memory with the client, for reading and writing objects."""
        answer = self._client.register_buffer(memory.ctypes.data, memory.nbytes)
        if answer:
            raise self._failed("register_buffer", answer)
        self._memory.append(memory)

    def put(self, objects: Sequence[tuple[str, Parts]]) -> list[bool]:
        """Store objects that do not exist yet. Return, for each, whether it exists now."""
        if not objects:
            return []
        put = self._client.batch_put_from_multi_buffers
        answers = self._move(lambda *about: put(*about, self._how), objects)
        return [self._answer("put", answer, _NOT_STORED, _KEPT) for answer in answers]

    def get(self, objects: Sequence[tuple[str, Parts]]) -> list[int]:
        """Read whole objects. Return the size of each in bytes, or `ABSENT`."""
        if not objects:
            return []
        answers = self._move(self._client.batch_get_into_multi_buffers, objects)
        found = []
        for (name, parts), answer in zip(objects, answers, strict=True):
            size = self.size(name) if answer in _UNLIKE_SIZE else answer
            if answer in _UNLIKE_SIZE and size == sum(part.nbytes for part in parts):
                raise self._failed("get", answer)  # the sizes match, so the transfer failed
            found.append(size if self._answer("get", size, (ABSENT, *_ABSENT)) else ABSENT)
        return found

    def ranges(self, name: str, wanted: Sequence[tuple[int, Bytes]]) -> int:
        """Read parts of an object and return the number of bytes read, or `ABSENT`."""
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
        """Read a part of an object into `into`, through the registered memory `between`.

        Returns the number of bytes read.
        """
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
        """Return for each name whether the object exists."""
        if not names:
            return []
        answers = self._client.batch_is_exist(list(names))
        return [self._answer("exists", answer, _ABSENT) and answer == 1 for answer in answers]

    def remove(self, names: Sequence[str]) -> int:
        """Remove objects and return how many existed."""
        if not names:
            return 0
        answers = self._client.batch_remove(list(names), True)
        return sum(self._answer("remove", answer, _ABSENT) for answer in answers)

    def remove_all(self, prefix: str) -> int:
        """Remove all objects whose names start with a prefix and return their number."""
        removed = self._client.remove_by_regex("^" + re.escape(prefix) + ".*", True)
        return int(removed) if self._answer("remove", removed) else 0

    def names(self, prefix: str = "") -> Iterator[str]:
        """Yield the names that start with a prefix."""
        for name in self._http_get("get_all_keys").splitlines():
            if name.startswith(prefix):
                yield name

    def size(self, name: str) -> int:
        """Return the size of an object in bytes, or `ABSENT`."""
        answer = self._client.get_size(name)
        return int(answer) if self._answer("size", answer, _ABSENT) else ABSENT

    def capacity(self) -> StoreRoom:
        """Return the used and total bytes and the number of objects of the store."""
        figures = {}
        for line in self._http_get("metrics").splitlines():
            name, _, value = line.partition(" ")
            if re.fullmatch(r"[0-9]{1,20}(\.[0-9]+)?(e\+?[0-9]{1,2})?", value):
                figures[name] = int(float(value))
        used, total = "master_allocated_bytes", "master_total_capacity_bytes"
        objects = figures.get("master_key_count", 0)
        return StoreRoom(figures.get(used, 0), figures.get(total, 0), objects)

    def close(self) -> None:
        """Close the client and withdraw this host's memory from the store."""
        if not self._movers.close(Deadline(_SECONDS)):
            return  # a call hangs in the client and still uses the registered memory
        for memory in self._memory:
            self._client.unregister_buffer(memory.ctypes.data)
        self._memory = []
        self._client.close()

    def _move(self, call: Callable[..., Any], objects: Sequence[tuple[str, Parts]]) -> Any:
        """Call the client in a low-priority thread, one call at a time.

        The thread holds references to the objects' memory. If the caller is interrupted, the call
        still completes before the next one may start.
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
        """Let one call at a time move bytes, because two in parallel would be slower.

        A call that has waited too long starts anyway.
        """
        alone = self._moving.acquire(timeout=_TURN)
        try:
            yield
        finally:
            if alone:
                self._moving.release()

    def _listed(
        self, objects: Sequence[tuple[str, Parts]]
    ) -> tuple[list[str], list[list[int]], list[list[int]]]:
        """Return names, addresses and sizes in the form that the client takes."""
        return (
            [name for name, _ in objects],
            [[part.ctypes.data for part in parts] for _, parts in objects],
            [[part.nbytes for part in parts] for _, parts in objects],
        )

    def _answer(
        self, call: str, answer: int, no: tuple[int, ...] = (), yes: tuple[int, ...] = ()
    ) -> bool:
        """Return True if `answer` is at least 0 or in `yes`, and False if it is in `no`.

        Raises an error for any other answer.
        """
        if answer >= 0 or answer in yes:
            return True
        if answer in no:
            return False
        raise self._failed(call, answer)

    def _http_get(self, name: str) -> str:
        """Return the response of the master's metrics server to a request for `/name`."""
        if not self._metrics:
            raise AtlasError(
                Code.WIRE_FAILED,
                "Listing and counting objects requires the address of the metrics server",
                got="no metrics= option",
                hint=f"Add the option to the address: mooncake://{self.master}?metrics=host:9003",
            )
        try:
            with closing(HTTPConnection(self._metrics, timeout=_SECONDS)) as connection:
                connection.request("GET", f"/{name}")
                return connection.getresponse().read().decode()
        except (OSError, ValueError, HTTPException) as fault:
            problem = "The metrics server of the Mooncake master cannot be read"
            hint = "Check that the master runs, and that metrics= contains its metrics port"
            got = f"{self._metrics}/{name}: {fault}"
            raise AtlasError(Code.WIRE_FAILED, problem, got=got, hint=hint) from None

    def _failed(self, call: str, answer: object) -> AtlasError:
        problem = f"The Mooncake client's call {call} failed"
        got = f"{answer} from master {self.master}"
        hint = "Check that the master is running, and look up the error code in Mooncake's log"
        return AtlasError(Code.WIRE_FAILED, problem, got=got, hint=hint)
