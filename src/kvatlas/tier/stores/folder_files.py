"""Files of a `FolderStore`: check, list, create, read, write and remove them.

Symbolic links below the folder are not followed: they could lead to files of other programs, or to
objects of another tenant.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvatlas.tier.stores.base import Parts

UNFINISHED = ".new"
"""The end of the names of files that are being written."""
_WRITING = ".writing"
"""The folder of unfinished files. No object can have a name that starts with a dot."""
_ABANDONED = 600.0
"""Seconds after which an unfinished file counts as abandoned."""
_MOST_PARTS = 512
"""Maximum number of memory ranges in one system call."""
_FOLDER_TRIES = 8
"""Number of attempts to create a folder that other processes remove concurrently."""
_NETWORK = ("9p", "afs", "beegfs", "ceph", "cifs", "fuse", "gfs2", "glusterfs", "gpfs", "lustre",
            "ncpfs", "nfs", "ocfs2", "smb", "virtiofs", "wekafs")  # fmt: skip
"""First letters of file systems on which the locks of SQLite may not work."""
MOUNTS = Path("/proc/self/mountinfo")
_LATEST = 2**63 - 1
"""The latest time in nanoseconds that a database can contain. File systems allow later ones."""
_NAME = re.compile(r"[a-z0-9_-][a-z0-9_.-]*(/[a-z0-9_-][a-z0-9_.-]*)*")


def is_name(name: str) -> bool:
    """Return whether a text is a valid object name. Other names could lead out of the folder.

    >>> is_name("kv2/0f3a/0.0-64/7"), is_name("kv2/../secret"), is_name("/etc/passwd")
    (True, False, False)
    """
    return _NAME.fullmatch(name) is not None


def leads_away(root: Path, path: Path) -> bool:
    """Return whether a folder between `root` and `path` is a symbolic link."""
    at = str(root)
    for word in path.parts[len(root.parts) : -1]:
        at = f"{at}/{word}"
        try:
            if stat.S_ISLNK(os.lstat(at).st_mode):
                return True
        except (FileNotFoundError, NotADirectoryError):
            return False
    return False


def is_object(path: Path) -> bool:
    """Return whether a path is a regular file. Opening others, such as pipes, could block."""
    try:
        return is_there(path)
    except OSError:
        return False


def is_there(path: Path) -> bool:
    """Return the same as `is_object`, but raise `OSError` if the disk fails."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def objects_below(root: Path, folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the name and the status of each object below `folder`, which is `root` or below it.

    Files and folders with a name that no object can have are skipped, because they belong to other
    programs. Folders other than `root` that this user may not read are skipped too.
    """
    if leads_away(root, folder / "x"):
        return
    waiting = [folder]
    while waiting:
        where = waiting.pop()
        refused = () if where == root else (PermissionError,)
        with (
            suppress(FileNotFoundError, NotADirectoryError, *refused),
            os.scandir(where) as entries,
        ):
            for entry in entries:
                if not is_name(entry.name) or entry.name.endswith(UNFINISHED):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
                elif entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):  # others remove objects too
                        about = entry.stat(follow_symlinks=False)
                        yield Path(entry.path).relative_to(root).as_posix(), about


def remove_file(root: Path, path: Path) -> bool:
    """Remove a file, and its parent folders if they become empty. Return whether it existed."""
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    with suppress(OSError):  # a folder that is not empty is kept
        while (path := path.parent) != root:
            path.rmdir()
    return True


def write_object(root: Path, path: Path, parts: Parts) -> None:
    """Write a file under a temporary name and link it to its name, unless the object exists.

    A pipe, a symbolic link or an empty folder under this name is replaced.
    """
    descriptor, unfinished = _create(root)
    try:
        _write(descriptor, parts)
        set_used(descriptor)
        for tries_left in reversed(range(_FOLDER_TRIES)):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                _link(unfinished, path)
                break
            except FileNotFoundError:  # another process has removed the folder, which was empty
                if not tries_left:
                    raise
    finally:
        os.close(descriptor)
        unfinished.unlink(missing_ok=True)


def set_used(file: int | Path) -> None:
    """Record the current time as a file's last use, with the resolution of the clock."""
    now = time.time_ns()
    os.utime(file, ns=(now, now))


def last_use(about: os.stat_result) -> int:
    """Return when a file was last used, as a positive number that a database can contain.

    Times are in nanoseconds since 1970.
    """
    return min(max(about.st_mtime_ns, 1), _LATEST)


def _create(root: Path) -> tuple[int, Path]:
    """Create an unfinished file and return its descriptor for writing and its path."""
    unfinished = root / _WRITING / f"{secrets.token_hex(8)}{UNFINISHED}"
    if leads_away(root, unfinished):
        raise OSError(f"a symbolic link in the place of a folder: {unfinished.parent}")
    unfinished.parent.mkdir(mode=0o700, exist_ok=True)
    return os.open(
        unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
    ), unfinished


def _link(unfinished: Path, path: Path) -> None:
    try:
        os.link(unfinished, path)
    except FileExistsError:
        if is_object(path):
            return
        with suppress(OSError):
            path.rmdir()
        unfinished.rename(path)


def remove_abandoned(root: Path, *, everywhere: bool = False) -> int:
    """Remove unfinished files without recent writes. Return their total size in bytes.

    With `everywhere`, search all folders: programs other than kvatlas may write next to objects.
    """
    before, removed = time.time() - _ABANDONED, 0
    folder = root if everywhere else root / _WRITING
    if leads_away(root, folder / "x"):
        return 0
    for where, folders, files in os.walk(folder):
        if not everywhere:
            folders.clear()
        for path in (Path(where, file) for file in files if file.endswith(UNFINISHED)):
            with suppress(FileNotFoundError):
                about = path.lstat()
                if about.st_mtime < before:
                    path.unlink()
                    removed += about.st_size
    return removed


@contextmanager
def opened(path: Path) -> Iterator[int | None]:
    """Open a file for reading; yield None if it does not exist or is not a regular file."""
    try:
        found = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        found = None
    except OSError:
        if is_object(path):
            raise
        found = None
    if found is None:
        yield None
        return
    try:
        yield found if stat.S_ISREG(os.fstat(found).st_mode) else None
    finally:
        os.close(found)


def sync_folder(path: Path) -> None:
    """Flush a folder to disk, so that the names of new files survive a power failure."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def network_file_system(path: Path) -> str:
    """Return the kind of network file system that a path is on, or "" if it is a local one."""
    where, kind, longest = path.resolve(), "", -1
    for line in MOUNTS.read_text(errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        mounted = Path(before.split(" ")[4].encode().decode("unicode_escape"))
        if where.is_relative_to(mounted) and len(mounted.parts) >= longest:
            longest, kind = len(mounted.parts), after.split(" ")[0]
    return kind if kind.startswith(_NETWORK) else ""


def _write(descriptor: int, parts: Parts) -> None:
    views = [part.data for part in parts]
    while views:
        done = os.writev(descriptor, views[:_MOST_PARTS])
        views = _remaining(views, done)


def read(descriptor: int, parts: Parts) -> int:
    """Read a file from its start into memory ranges and return the number of bytes read."""
    views, done = [part.data for part in parts], 0
    while views:
        some = os.readv(descriptor, views[:_MOST_PARTS])
        if not some:
            break
        views, done = _remaining(views, some), done + some
    return done


def _remaining(views: list[memoryview], done: int) -> list[memoryview]:
    """Return the memory ranges that remain after the first `done` bytes."""
    for place, view in enumerate(views):
        if done < view.nbytes:
            return [view[done:], *views[place + 1 :]]
        done -= view.nbytes
    return []
