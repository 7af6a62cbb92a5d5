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
from kvatlas.wire.peers import check_plan_size

_REMOVE = "Check the path. A damaged file can be deleted: its content can be recomputed"
_SECTOR = 512
"""The unit in which the system reports allocated space, in bytes."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def open_own(path: Path) -> int:
    """Open a file that this user owns and no other user may write to."""
    with refusals(path):
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    state = os.fstat(fd)
    if not stat.S_ISREG(state.st_mode):
        os.close(fd)
        raise _unreadable(path, "not a regular file")
    if state.st_uid != os.geteuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.close(fd)
        problem = "The tier's file belongs to another user, or other users may write to it"
        got = f"user {state.st_uid}, mode {stat.S_IMODE(state.st_mode):o}: {path}"
        hint = "Run as its owner and remove the write permission of others: chmod go-w"
        raise AtlasError(Code.UNREADABLE, problem, got=got, hint=hint)
    return fd


def create_file(path: Path, plan: Plan) -> None:
    """Create the file under a temporary name and rename it when it is complete."""
    text = plan.to_json()
    extent = Extent(plan, len(text))
    if len(text) > LONGEST_PLAN:
        raise _unreadable(path, f"a plan of {len(text):,} bytes, which is too large")
    beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with refusals(path):
        fd = os.open(beside, flags, 0o600)
        try:
            allocate(fd, extent.nbytes)
            write_all(fd, header(text, secrets.token_bytes(16), extent) + text, 0)
            os.fsync(fd)
            with suppress(FileExistsError):  # somebody was faster: theirs is as good
                os.link(beside, path)
        finally:
            os.close(fd)
            beside.unlink()
        _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    """Flush the names in a folder to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def allocate(fd: int, nbytes: int) -> None:
    """Allocate the file's space, so that later writes cannot fail; keeps its content."""
    state = os.fstat(fd)
    if state.st_size < nbytes or state.st_blocks * _SECTOR < nbytes:
        os.posix_fallocate(fd, 0, nbytes)


def write_all(fd: int, text: bytes | memoryview, offset: int) -> None:
    """Write all bytes, in as many calls as necessary."""
    done = os.pwrite(fd, text, offset)
    while done < len(text):
        done += os.pwrite(fd, text[done:], offset + done)


def read_all(fd: int, nbytes: int, offset: int) -> bytes:
    """Read `nbytes` bytes, or raise an error if the file ends before."""
    text = b""
    while len(text) < nbytes:
        more = os.pread(fd, nbytes - len(text), offset + len(text))
        if not more:
            raise OSError(errno.ENODATA, f"The file ends at byte {offset + len(text)}")
        text += more
    return text


def read_plan(fd: int, path: Path) -> tuple[Plan, bytes, Extent]:
    """Read the plan, id and extent of a file, and check that they are consistent."""
    first_page = read_all(fd, PAGE, 0)
    if not first_page.startswith(MAGIC):
        raise _unreadable(path, "not the file of a tier")
    said = read_header(first_page)
    if said.version != VERSION:
        problem = f"The tier's file must have format version {VERSION}"
        raise _refusal(Code.UNLIKE_VERSIONS, problem, path, f"version {said.version}")
    if not 0 < said.plan_bytes <= LONGEST_PLAN:
        raise _unreadable(path, f"a plan of {said.plan_bytes:,} bytes, which is out of range")
    text = read_all(fd, said.plan_bytes, PAGE)
    if hashlib.sha256(text).digest() != said.plan_digest:
        raise _wrong(path, "a plan that does not match its digest")
    try:
        check_plan_size(text)
        plan = Plan.from_json(text)
        extent = Extent(plan, len(text))
    except AtlasError as problem:
        if problem.code in (Code.BAD_PLAN, Code.UNLIKE_VERSIONS):
            raise
        raise AtlasError(Code.BAD_PLAN, got=str(problem.got)[:200], hint=_REMOVE) from None
    if first_page != header(text, said.identity, extent):
        raise _wrong(path, "a header that does not match the plan")
    check_length(fd, path, extent)
    return plan, said.identity, extent


def check_length(fd: int, path: Path, extent: Extent) -> None:
    """Raise an error if the length of a file differs from that of its plan."""
    if (size := os.fstat(fd).st_size) != extent.nbytes:
        raise _unreadable(path, f"{size:,} bytes instead of {extent.nbytes:,}")


@contextmanager
def refusals(path: Path) -> Iterator[None]:
    """Turn system errors into `AtlasError`."""
    try:
        yield
    except OSError as fault:
        if fault.errno not in _NO_ROOM:
            raise _unreadable(path, fault.strerror or str(fault)) from fault
        problem = "The disk does not have enough space for the tier's file"
        hint = "Free some space, plan the tier with less memory, or use another disk"
        got = f"{fault.strerror}: {path}"
        raise AtlasError(Code.NOT_ENOUGH_MEMORY, problem, got=got, hint=hint) from fault


def _wrong(path: Path, got: str) -> AtlasError:
    return _refusal(Code.CHECKSUM, "The header of the tier's file is damaged", path, got)


def _unreadable(path: Path, got: str) -> AtlasError:
    problem = "The tier's file is not accessible or not valid"
    return _refusal(Code.UNREADABLE, problem, path, got)


def _refusal(code: Code, problem: str, path: Path, got: str) -> AtlasError:
    return AtlasError(code, problem, got=f"{got}: {path}", hint=_REMOVE)
