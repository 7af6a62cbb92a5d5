"""`RedisStore`: objects in Redis or Valkey.

The objects of a tier's key are fields of one Redis hash. An object's name consists of
words separated by slashes. The first four words are equal for all objects of a key, and are the
name of the hash. Redis therefore evicts whole rows, and removing a key is one command. Configure
`maxmemory` and a policy such as `allkeys-lru` in the server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvatlas.errors import AtlasError, Code, MissingExtraError
from kvatlas.geometry.integers import duration
from kvatlas.tier.addresses import without_secrets
from kvatlas.tier.stores.base import (
    ABSENT,
    ObjectStore,
    Parts,
    StoreRoom,
    key_of,
    read_into,
)

SCHEMES = ("redis", "rediss", "valkey", "valkeys")
_RETRIES = 1
_SPECIAL = str.maketrans({letter: f"\\{letter}" for letter in "*?[]\\"})
"""Characters with a meaning in patterns of SCAN."""


class RedisStore(ObjectStore):
    """A client of a Redis or Valkey server: `RedisStore("redis://127.0.0.1:6379/0")`.

    The client waits at most half of `timeout` seconds for data, and repeats a command once after a
    connection error. `rediss://` uses TLS. The address may contain user and password.
    """

    def __init__(self, where: str, *, timeout: float = 5.0) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise MissingExtraError("redis", "redis") from None
        self._redis: Any = redis
        address = where.replace("valkey", "redis", 1) if where.startswith("valkey") else where
        self.where = without_secrets(where)
        half = duration(timeout) / 2
        about = {"socket_timeout": half, "socket_connect_timeout": half}
        again = Retry(NoBackoff(), _RETRIES)
        errors = [redis.exceptions.ConnectionError]
        try:
            self._client: Any = redis.Redis.from_url(
                address, retry=again, retry_on_error=errors, **about
            )
        except ValueError:  # its text may contain a part of the password
            problem = "The address of the Redis server is not valid"
            hint = "Use an address such as redis://127.0.0.1:6379/0, and %2F for / in a password"
            raise AtlasError(Code.BAD_CONFIG, problem, got=self.where, hint=hint) from None

    def put(self, objects: Sequence[tuple[str, Parts]]) -> list[bool]:
        """Store objects that do not exist yet. Return, for each, whether it exists now."""

        def ask(pipe: Any) -> None:
            for name, parts in objects:
                content = parts[0] if len(parts) == 1 else np.concatenate(parts)
                pipe.hsetnx(*_place(name), content.data)

        return [self._stored(answer) for answer in self._pipeline(ask, objects)]

    def _stored(self, answer: object) -> bool:
        """Return whether an object was stored or existed; False if the server lacks memory."""
        if isinstance(answer, self._redis.exceptions.OutOfMemoryError):
            return False
        return bool(self._checked(answer) in (0, 1))

    def get(self, objects: Sequence[tuple[str, Parts]]) -> list[int]:
        """Read whole objects. Return the size of each in bytes, or `ABSENT`."""
        answers = self._hashes("hget", [name for name, _ in objects])
        found = [None if one is None else np.frombuffer(one, np.uint8) for one in answers]
        pairs = zip(objects, found, strict=True)
        return [read_into(parts, content) for (_, parts), content in pairs]

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Return for each name whether the object exists."""
        return [bool(answer) for answer in self._hashes("hexists", names)]

    def remove(self, names: Sequence[str]) -> int:
        """Remove objects and return how many existed."""
        return sum(self._hashes("hdel", names))

    def remove_all(self, prefix: str) -> int:
        """Remove all objects whose names start with a prefix and return their number."""
        if not prefix or key_of(prefix) != prefix:
            return self.remove(list(self.names(prefix)))

        def ask(pipe: Any) -> None:
            pipe.hlen(prefix)
            pipe.unlink(prefix)

        count, _ = map(self._checked, self._pipeline(ask, [prefix] * 2))
        return int(count)

    def names(self, prefix: str = "") -> Iterator[str]:
        """Yield the names that start with a prefix."""
        with self._failures():
            keys = [key_of(prefix)] if key_of(prefix) else self._keys(prefix)
            for key in keys:
                for field in self._client.hkeys(key):
                    name = _text(key) + _text(field)
                    if name.startswith(prefix):
                        yield name

    def _keys(self, prefix: str) -> Iterator[Any]:
        pattern = prefix.translate(_SPECIAL) + "*"
        found = self._client.scan_iter(match=pattern, count=1000, _type="hash")
        yield from dict.fromkeys(found)  # SCAN may return a key twice

    def size(self, name: str) -> int:
        """Return the size of an object in bytes, or `ABSENT`."""

        def ask(pipe: Any) -> None:
            pipe.hexists(*_place(name))
            pipe.hstrlen(*_place(name))

        there, size = map(self._checked, self._pipeline(ask, [name] * 2))
        return int(size) if there else ABSENT

    def capacity(self) -> StoreRoom:
        """Return the memory that the server uses, its limit, and the number of objects."""
        with self._failures():
            about = self._client.info("memory")
        objects = sum(1 for _ in self.names())
        return StoreRoom(int(about["used_memory"]), int(about.get("maxmemory", 0)), objects)

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def _hashes(self, command: str, names: Sequence[str]) -> list[Any]:
        """Execute a command for each name and return the results."""

        def ask(pipe: Any) -> None:
            for name in names:
                getattr(pipe, command)(*_place(name))

        return [self._checked(answer) for answer in self._pipeline(ask, names)]

    def _pipeline(self, ask: Callable[[Any], None], asked: Sequence[object]) -> list[Any]:
        """Send commands together and return their results, errors included."""
        if not asked:
            return []
        with self._failures():
            pipe = self._client.pipeline(transaction=False)
            ask(pipe)
            return list(pipe.execute(raise_on_error=False))

    def _checked(self, answer: Any) -> Any:
        if isinstance(answer, Exception):
            with self._failures():
                raise answer
        return answer

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Raise errors of the client as `AtlasError`."""
        try:
            yield
        except (self._redis.exceptions.RedisError, OSError, ValueError) as fault:
            problem = "A command to the Redis server failed"
            hint = "Check the address, the credentials and the network"
            got = f"{self.where}: {str(fault)[:200]}"
            raise AtlasError(Code.WIRE_FAILED, problem, got=got, hint=hint) from None


def _place(name: str) -> tuple[str, str]:
    """Return the hash and the field of an object. For a short name, the field is "".

    >>> _place("kv2/tenant/namespace/key/0.0-64/0"), _place("kv2/tenant/marks/digest")
    (('kv2/tenant/namespace/key/', '0.0-64/0'), ('kv2/tenant/marks/digest', ''))
    """
    key = key_of(name)
    return (key, name[len(key) :]) if key else (name, "")


def _text(found: bytes | str) -> str:
    return found if isinstance(found, str) else found.decode(errors="replace")
