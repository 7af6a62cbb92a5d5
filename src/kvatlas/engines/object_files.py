"""`ObjectFiles`: a folder in which another engine stores objects, one file each, as a store.

File names, headers and bytes are as the engine writes them, so that the engine can read the files
of the store. The store evicts nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvatlas.engines.paged_buffer import PagedBuffer
from kvatlas.errors import AtlasError, Code
from kvatlas.tier.stores.base import ABSENT, ObjectStore, Parts, StoreRoom, joined_size


class ObjectFiles(ObjectStore):
    """Objects as files of a folder. A file's name is the name of the object, followed by `ending`.

    `slash` replaces each slash of a name. A file starts with `header`, which is not part of the
    object. A file with another header is refused, because its bytes mean something else.

    >>> import tempfile, numpy as np
    >>> store = ObjectFiles(tempfile.mkdtemp(), ending=".bin")
    >>> content = np.arange(4, dtype=np.uint8)
    >>> store.put([("page", [content])]), list(store.names()), store.size("page")
    ([True], ['page'], 4)
    """

    def __init__(
        self, folder: str | Path, *, ending: str, header: bytes = b"", slash: str | None = None
    ) -> None:
        self.folder, self._ending, self._header, self._slash = Path(folder), ending, header, slash

    def put(self, objects: Sequence[tuple[str, Parts]]) -> list[bool]:
        """Store objects that do not exist yet. Return, for each, whether it exists now."""
        with self._faults(Code.UNWRITABLE):
            for name, parts in objects:
                path = self._path(name)
                new = self.folder / f".{os.urandom(16).hex()}.tmp"
                try:
                    with new.open("xb") as file:
                        file.write(self._header)
                        for part in parts:
                            file.write(part.data)
                    if not path.exists():
                        new.replace(path)
                finally:
                    new.unlink(missing_ok=True)
        return [True] * len(objects)

    def get(self, objects: Sequence[tuple[str, Parts]]) -> list[int]:
        """Read whole objects into memory. Return the size of each in bytes, or `ABSENT`."""
        return [self._read(name, parts) for name, parts in objects]

    def _read(self, name: str, parts: Parts) -> int:
        with self._faults(Code.UNREADABLE):
            try:
                with self._path(name).open("rb", buffering=0) as file:
                    size = os.fstat(file.fileno()).st_size - len(self._header)
                    found = file.read(len(self._header))
                    if found != self._header:
                        raise AtlasError(
                            Code.UNREADABLE,
                            f"The file of object {name} has another header",
                            got=found.hex(" ", 4) or "an empty file",
                            hint=f"Expected {self._header.hex(' ', 4)}: check the model, dtype "
                            "and format of the store",
                        )
                    if size == joined_size(parts):
                        for part in parts:
                            if file.readinto(part.data) != part.nbytes:
                                return 0  # the file was shortened meanwhile
                    return size
            except FileNotFoundError:
                return ABSENT

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Return for each name whether the object exists."""
        return [self._path(name).exists() for name in names]

    def remove(self, names: Sequence[str]) -> int:
        """Remove objects and return how many existed."""
        removed = 0
        with self._faults(Code.UNWRITABLE):
            for name in names:
                try:
                    self._path(name).unlink()
                except FileNotFoundError:
                    continue
                removed += 1
        return removed

    def names(self, prefix: str = "") -> Iterator[str]:
        """Yield the names that start with a prefix, in any order."""
        with self._faults(Code.UNREADABLE):
            for entry in os.scandir(self.folder):
                name = entry.name.removesuffix(self._ending)
                if name == entry.name or name.startswith("."):
                    continue
                whole = name.replace(self._slash, "/") if self._slash else name
                if whole.startswith(prefix):
                    yield whole

    def size(self, name: str) -> int:
        """Return the size of an object in bytes, or `ABSENT`."""
        try:
            return self._path(name).stat().st_size - len(self._header)
        except FileNotFoundError:
            return ABSENT

    def capacity(self) -> StoreRoom:
        """Return the used bytes and the number of objects of the folder."""
        sizes = [max(self.size(name), 0) for name in self.names()]
        return StoreRoom(sum(sizes), 0, len(sizes))

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _path(self, name: str) -> Path:
        file = name.replace("/", self._slash) if self._slash else name
        if "/" in file or "\0" in file or file.startswith("."):
            raise AtlasError(
                Code.OUT_OF_RANGE,
                "An object's name must be a file name",
                got=repr(name),
                hint="Pass a key as the engine makes it",
            )
        return self.folder / f"{file}{self._ending}"

    @contextmanager
    def _faults(self, code: Code) -> Iterator[None]:
        try:
            yield
        except OSError as fault:
            problem = "A file of the store cannot be read or written"
            raise AtlasError(
                code, problem, got=str(fault), hint="Check the folder and its permissions"
            ) from None


def read_pages(store: ObjectStore, names: Sequence[str], into: PagedBuffer) -> int:
    """Read objects into the pages of a buffer; return how many leading pages were read.

    Object n becomes page n. Reading stops at the first object that is absent or has another size.
    """
    for n, name in enumerate(names):
        page = into.pages[n]
        if store.get([(name, [page])])[0] != page.nbytes:
            return n
    return len(names)


def write_pages(store: ObjectStore, names: Sequence[str], held: PagedBuffer) -> int:
    """Store the pages of a buffer as objects; return how many of them exist now."""
    return sum(store.put([(name, [held.pages[n]]) for n, name in enumerate(names)]))
