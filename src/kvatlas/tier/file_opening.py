"""Create, open and validate the file of a tier.

A file is created atomically, and its content is not trusted. System errors of a failing or full
disk are raised as `AtlasError`.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.tier.format import LONGEST_PLAN, MAGIC, PAGE, VERSION, Extent, header, read_header
from kvatlas.tier.stores.folder_files import sync_folder
from kvatlas.wire.handshake_checks import check_plan_size

_REMOVE = "Check the path. A damaged file can be deleted: its content can be recomputed"
_CHECK = "Check the path, the permissions and the disk"
_SECTOR = 512
"""The unit of `st_blocks`, which is the allocated space of a file, in bytes."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def open_own(path: Path) -> int:
    """Open a file and return its descriptor.

    Raises an error unless this user owns the file and no other user may write to it.
    """
    with refusals(path):
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    state = os.fstat(fd)
    if not stat.S_ISREG(state.st_mode):
        os.close(fd)
        raise _unreadable(path, "a path that is not a regular file")
    if state.st_uid != os.geteuid():
        os.close(fd)
        problem, got = "The tier's file belongs to another user", f"user {state.st_uid}: {path}"
        hint = "Run as the file's owner, or use another path"
        raise AtlasError(Code.UNREADABLE, problem, got=got, hint=hint)
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.close(fd)
        problem = "The tier's file must not be writable by another user"
        got = f"mode {stat.S_IMODE(state.st_mode):o}: {path}"
        hint = f"Remove the write permission of others: chmod go-w {path}"
        raise AtlasError(Code.UNREADABLE, problem, got=got, hint=hint)
    return fd


def create_file(path: Path, plan: Plan) -> None:
    """Create a tier's file under a temporary name, and link it to `path` when it is complete.

    If another process has created the file in the meantime, that file is kept.
    """
    text = plan.to_json()
    extent = Extent(plan, len(text))
    if len(text) > LONGEST_PLAN:
        problem = f"The plan of a tier's file must be at most {LONGEST_PLAN:,} bytes long"
        got, hint = f"{len(text):,} bytes for {path}", "Plan the tier for a model with fewer layers"
        raise AtlasError(Code.UNREADABLE, problem, got=got, hint=hint)
    beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with refusals(path):
        fd = os.open(beside, flags, 0o600)
        try:
            allocate(fd, extent.nbytes)
            write_all(fd, header(text, secrets.token_bytes(16), extent) + text, 0)
            os.fsync(fd)
            with suppress(FileExistsError):  # another process was faster; its file is as good
                os.link(beside, path)
        finally:
            os.close(fd)
            beside.unlink()
        sync_folder(path.parent)


def allocate(fd: int, nbytes: int) -> None:
    """Allocate disk space for `nbytes` bytes, so that later writes cannot run out of space."""
    state = os.fstat(fd)
    if state.st_size < nbytes or state.st_blocks * _SECTOR < nbytes:
        os.posix_fallocate(fd, 0, nbytes)


def write_all(fd: int, text: bytes | memoryview, offset: int) -> None:
    """Write all bytes of `text` at `offset`, in as many system calls as necessary."""
    done = os.pwrite(fd, text, offset)
    while done < len(text):
        done += os.pwrite(fd, text[done:], offset + done)


def read_all(fd: int, nbytes: int, offset: int) -> bytes:
    """Read exactly `nbytes` bytes at `offset`. Raises `OSError` if the file ends earlier."""
    text = b""
    while len(text) < nbytes:
        more = os.pread(fd, nbytes - len(text), offset + len(text))
        if not more:
            raise OSError(errno.ENODATA, f"a truncated file that ends at byte {offset + len(text)}")
        text += more
    return text


def read_plan(fd: int, path: Path) -> tuple[Plan, bytes, Extent]:
    """Check the header of a tier file and return (plan, file id, section offsets)."""
    first_page = read_all(fd, PAGE, 0)
    if not first_page.startswith(MAGIC):
        raise _unreadable(path, "a file that is not a tier of kvatlas")
    said = read_header(first_page)
    if said.version != VERSION:
        problem = f"The tier's file must have format version {VERSION}"
        got = f"version {said.version}: {path}"
        hint = "Use another path, or delete the file: its content can be recomputed"
        raise AtlasError(Code.UNLIKE_VERSIONS, problem, got=got, hint=hint)
    if not 0 < said.plan_bytes <= LONGEST_PLAN:
        got = f"a plan of {said.plan_bytes:,} bytes, expected 1 to {LONGEST_PLAN:,}"
        raise _unreadable(path, got)
    text = read_all(fd, said.plan_bytes, PAGE)
    if hashlib.sha256(text).digest() != said.plan_digest:
        raise _wrong(path, "a plan that does not match its digest")
    try:
        check_plan_size(text)
        plan = Plan.from_json(text)
        extent = Extent(plan, len(text))
    except AtlasError as refusal:
        if refusal.code in (Code.BAD_PLAN, Code.UNLIKE_VERSIONS):
            raise
        problem = "The plan in the tier's file is invalid"
        got = f"{refusal.problem}: {str(refusal.got)[:200]}"
        raise AtlasError(Code.BAD_PLAN, problem, got=got, hint=_REMOVE) from None
    if first_page != header(text, said.identity, extent):
        raise _wrong(path, "a header that does not match the plan")
    check_length(fd, path, extent)
    return plan, said.identity, extent


def check_length(fd: int, path: Path, extent: Extent) -> None:
    """Raise an error unless an open file has the length that `extent` specifies."""
    if (size := os.fstat(fd).st_size) != extent.nbytes:
        raise _unreadable(path, f"a file of {size:,} bytes, expected {extent.nbytes:,}")


@contextmanager
def refusals(path: Path) -> Iterator[None]:
    """Raise each `OSError` of the context as an `AtlasError` that contains the path."""
    try:
        yield
    except OSError as fault:
        why = fault.strerror or str(fault)
        if fault.errno == errno.ENODATA:
            raise _unreadable(path, why) from fault
        if fault.errno not in _NO_ROOM:
            problem, got = "The tier's file cannot be accessed", f"{why}: {path}"
            raise AtlasError(Code.UNREADABLE, problem, got=got, hint=_CHECK) from fault
        problem = "The disk does not have enough space for the tier's file"
        hint = "Free some space, plan the tier with less memory, or use another disk"
        got = f"{why}: {path}"
        raise AtlasError(Code.NOT_ENOUGH_MEMORY, problem, got=got, hint=hint) from fault


def _wrong(path: Path, got: str) -> AtlasError:
    problem = "The header of the tier's file is damaged"
    return AtlasError(Code.CHECKSUM, problem, got=f"{got}: {path}", hint=_REMOVE)


def _unreadable(path: Path, got: str) -> AtlasError:
    problem = "The tier's file is not valid"
    return AtlasError(Code.UNREADABLE, problem, got=f"{got}: {path}", hint=_REMOVE)
