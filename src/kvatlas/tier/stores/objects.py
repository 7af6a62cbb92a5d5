"""`BucketStore`: objects in S3, Google Cloud Storage, Azure or MinIO, through `obstore`.

Every request is retried after connection errors and responses with status 5xx, within the timeout.
The requests of a batch run in parallel. Objects are created only if they do not exist, with a
conditional put where the service supports it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np

from kvatlas.copying.run_bounds import Bytes
from kvatlas.errors import AtlasError, Code, MissingExtraError
from kvatlas.geometry.integers import duration
from kvatlas.tier.addresses import without_secrets
from kvatlas.tier.store_calls import Deadline, StoreCalls
from kvatlas.tier.stores.base import ABSENT, ObjectStore, Parts, StoreRoom, joined_size, read_into

T = TypeVar("T")
REQUESTS = 16
"""Number of requests of one store in parallel."""
_RETRIES = 8
SCHEMES = ("s3", "gs", "az", "abfs", "abfss", "azure")
"""The schemes of addresses that `obstore` can open with credentials."""


class BucketStore(ObjectStore):
    """Objects below a prefix of a bucket: `BucketStore("s3://bucket/prefix", region="eu-west-1")`.

    A call for one object takes at most `timeout` seconds. `options` are options of `obstore`, such
    as `endpoint`, `region` and `skip_signature`. Credentials are read from the environment, like
    those of the service's own tools. The bucket must exist. It should delete objects by age,
    because this store never evicts. After the first request to any bucket, forked children of the
    process cannot make requests: their calls raise an error.
    """

    def __init__(self, where: str, *, timeout: float = 5.0, **options: Any) -> None:
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            raise MissingExtraError("obstore", "objects") from None
        self._obstore: Any = obstore
        self.where = without_secrets(where)
        # A request may begin at the end of the time for retries.
        half = timedelta(seconds=duration(timeout) / 2)
        plain = str(options.get("endpoint", "")).startswith("http://")
        client = {"timeout": half, "connect_timeout": half, "allow_http": plain}
        retry = {"max_retries": _RETRIES, "retry_timeout": half, "backoff": _BACKOFF}
        try:
            self._bucket: Any = from_url(
                where, config=options, client_options=client, retry_config=retry
            )
        except (ValueError, obstore.exceptions.BaseError) as fault:
            problem = "The address or an option of the bucket is not valid"
            hint = "Use s3://bucket/prefix and options of obstore, such as region and endpoint"
            got = f"{self.where}: {str(fault)[:200]}"
            raise AtlasError(Code.BAD_CONFIG, problem, got=got, hint=hint) from None
        self._conditional = True
        """Whether the service supports conditional puts, as far as is known."""
        self._requests: StoreCalls | None = None
        """The threads, from the first call that needs them."""
        self._starting, self._closed = threading.Lock(), False

    def put(self, objects: Sequence[tuple[str, Parts]]) -> list[bool]:
        """Store objects that do not exist yet. Return, for each, whether it exists now."""
        return self._each(lambda one: self._put(*one), objects)

    def _put(self, name: str, parts: Parts) -> bool:
        content = parts[0] if len(parts) == 1 else np.concatenate(parts)
        about = {"use_multipart": False, "mode": "create" if self._conditional else "overwrite"}
        errors = self._obstore.exceptions
        try:
            self._obstore.put(self._bucket, name, content.data, **about)
        except errors.AlreadyExistsError:
            return True
        except (errors.NotSupportedError, NotImplementedError):
            self._conditional = False  # objects with one name have the same content
            return self._put(name, parts)
        return True

    def get(self, objects: Sequence[tuple[str, Parts]]) -> list[int]:
        """Read whole objects. Return the size of each in bytes, or `ABSENT`."""
        return self._each(lambda one: self._get(*one), objects)

    def _get(self, name: str, parts: Parts) -> int:
        try:
            found = self._obstore.get(self._bucket, name)
            size = int(found.meta["size"])
            if size != joined_size(parts):
                return size
            content = np.frombuffer(found.bytes(), np.uint8)
        except (self._obstore.exceptions.NotFoundError, FileNotFoundError):
            return ABSENT
        return read_into(parts, content)

    def ranges(self, name: str, wanted: Sequence[tuple[int, Bytes]]) -> int:
        """Read parts of an object and return the number of bytes read, or `ABSENT`."""
        size = self.size(name)
        inside = [(at, into[: size - at]) for at, into in wanted if at < size]
        if size == ABSENT or not inside:
            return min(size, 0)
        starts, lengths = [at for at, _ in inside], [into.nbytes for _, into in inside]
        about = {"starts": starts, "lengths": lengths}
        [found] = self._each(
            lambda one: self._obstore.get_ranges(self._bucket, one, **about), [name]
        )
        read = 0
        for (_, into), some in zip(inside, found, strict=True):
            content = np.frombuffer(some, np.uint8)
            into[: content.nbytes] = content
            read += content.nbytes
        return read

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Return for each name whether the object exists."""
        return [size != ABSENT for size in self._each(self._size, names)]

    def remove(self, names: Sequence[str]) -> int:
        """Remove objects and return how many existed."""
        there = [name for name, found in zip(names, self.exists(names), strict=True) if found]
        self._delete(there)
        return len(there)

    def remove_all(self, prefix: str) -> int:
        """Remove all objects whose names start with a prefix and return their number."""
        names = list(self.names(prefix))
        self._delete(names)
        return len(names)

    def _delete(self, names: list[str]) -> None:
        some = [names[at : at + 1000] for at in range(0, len(names), 1000)]
        self._each(lambda one: self._obstore.delete(self._bucket, one), some)

    def names(self, prefix: str = "") -> Iterator[str]:
        """Yield the names that start with a prefix."""
        return (name for name, _ in self._listed(prefix))

    def _listed(self, prefix: str) -> Iterator[tuple[str, int]]:
        folder = prefix.rpartition("/")[0]
        _check_process()
        with self._failures():
            for some in self._obstore.list(self._bucket, folder or None):
                for about in some:
                    if about["path"].startswith(prefix):
                        yield about["path"], about["size"]

    def size(self, name: str) -> int:
        """Return the size of an object in bytes, or `ABSENT`."""
        return self._each(self._size, [name])[0]

    def _size(self, name: str) -> int:
        try:
            return int(self._obstore.head(self._bucket, name)["size"])
        except (self._obstore.exceptions.NotFoundError, FileNotFoundError):
            return ABSENT

    def capacity(self) -> StoreRoom:
        """Return the used bytes and the number of objects. The total is unknown."""
        sizes = [size for _, size in self._listed("")]
        return StoreRoom(sum(sizes), 0, len(sizes))

    def close(self) -> None:
        """Wait for requests in flight and end the request threads.

        Each request ends by its timeout.
        """
        if _runtime.process not in (0, os.getpid()):
            return  # the threads are those of the parent, and so are the locks
        with self._starting:
            self._closed = True
            if self._requests is not None:
                self._requests.close(Deadline(0.0))

    def _threads(self) -> StoreCalls:
        with self._starting:
            if self._requests is None:
                self._requests = StoreCalls(REQUESTS)
                if self._closed:
                    self._requests.close(Deadline(0.0))  # it refuses calls
            return self._requests

    def _each(self, act: Callable[[Any], T], items: Sequence[Any]) -> list[T]:
        """Call a function for each item, in parallel. Raise the first error after all have ended.

        After the call, no request uses the memory of the caller any longer. The wait has no
        timeout, because `obstore` ends each request after a timeout.
        """
        _check_process()
        with self._failures():
            if len(items) == 1:
                return [act(items[0])]
            if not items:
                return []
            threads = self._threads()
            started = [threads.start(lambda one=item: act(one)) for item in items]  # type: ignore[misc]
            failed = [future.exception() for future in started]
            if any(failed):
                raise next(fault for fault in failed if fault is not None)
            return [future.result() for future in started]

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Raise errors of `obstore` as `AtlasError`."""
        try:
            yield
        except AtlasError:
            raise
        except (self._obstore.exceptions.BaseError, OSError, ValueError, RuntimeError) as fault:
            problem = "A request to the bucket failed"
            hint = "Check the address, the credentials and the network"
            text = str(fault).strip().partition("\n")[0] or type(fault).__name__
            got = f"{self.where}: {text[:200]}"
            raise AtlasError(Code.WIRE_FAILED, problem, got=got, hint=hint) from None


class _Runtime:
    """The id of the process in which the threads of `obstore` run; 0 before the first request.

    `obstore` starts its threads once. A forked child lacks them, so its requests would hang.
    """

    process = 0


_runtime = _Runtime()


def _check_process() -> None:
    """Raise an error if `obstore` was used before this process was forked."""
    _runtime.process = _runtime.process or os.getpid()
    if _runtime.process != os.getpid():
        problem = "Requests to buckets were made before this process was forked"
        hint = 'Start processes with multiprocessing.get_context("spawn")'
        got = "a request in a forked child"
        raise AtlasError(Code.WIRE_FAILED, problem, got=got, hint=hint)


_BACKOFF = {
    "init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1), "base": 2,
}  # fmt: skip
"""Pauses between retries: they start at 50 ms and double."""
