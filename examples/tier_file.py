"""Read and write the file of a kvatlas tier without kvatlas: docs/reference/tier_format.md as code.

Only the standard library is used. The plan stays JSON text: it gives the pools and their blocks.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PAGE, RECORD_BYTES = 4096, 128
HEADER = struct.Struct("<8sIIQ32s16sQQQ")
RECORD = struct.Struct("<4sIIIQQQQ64s")


class Block(NamedTuple):
    """A block of the file: its group, key, tokens and bytes."""

    group: int
    key: bytes
    first: int
    stop: int
    data: bytes


def digest(data: bytes, key: bytes = b"") -> bytes:
    return hashlib.blake2b(data, digest_size=16, key=key).digest()


def extent(plan: bytes) -> tuple[dict[int, tuple[int, int, int]], int, int]:
    """Return (offset, first number, block bytes) of each pool, the first record, all blocks."""
    at, count, found = -(-(PAGE + len(plan)) // PAGE) * PAGE, 0, {}
    for pool in sorted(json.loads(plan)["pools"], key=lambda one: one["index"]):
        found[pool["index"]] = (at, count, pool["block_bytes"])
        at = -(-(at + pool["blocks"] * pool["block_bytes"]) // PAGE) * PAGE
        count += pool["blocks"]
    return found, at, count


def header(plan: bytes, identity: bytes) -> bytes:
    _, records, count = extent(plan)
    about = len(plan), hashlib.sha256(plan).digest(), identity, count, records
    page = HEADER.pack(b"kvatlas\0", 1, RECORD_BYTES, *about, records + count * RECORD_BYTES)
    page = page.ljust(PAGE - 16, b"\0")
    return page + digest(page)


def read(path: Path) -> tuple[bytes, list[Block]]:
    """Return the plan and all blocks that are present and undamaged, oldest first."""
    data = path.read_bytes()
    length, identity = struct.unpack_from("<Q", data, 16)[0], data[56:72]
    plan = data[PAGE : PAGE + length]
    if data[:PAGE] != header(plan, identity):
        raise ValueError(f"{path}: not the file of a tier, or another version")
    return plan, [block for _, block in sorted(_blocks(data, plan, identity))]


def _blocks(data: bytes, plan: bytes, identity: bytes) -> Iterator[tuple[int, Block]]:
    pools, records, count = extent(plan)
    groups = json.loads(plan)["groups"]
    for number in range(count):
        record = data[records + number * RECORD_BYTES :][:RECORD_BYTES]
        if digest(record[:112], identity) != record[112:]:
            continue
        _, group, length, crc, sequence, place, first, stop, key = RECORD.unpack(record[:112])
        at, before, nbytes = pools[groups[group]["pool"]]
        content = data[at + (number - before) * nbytes :][:nbytes]
        if place == number and zlib.crc32(content) == crc:
            yield sequence, Block(group, key[:length], first, stop, content)


def write(path: Path, plan: bytes, blocks: list[Block]) -> None:
    """Create a file with this plan and these blocks, which must fit."""
    pools, records, count = extent(plan)
    identity, groups = secrets.token_bytes(16), json.loads(plan)["groups"]
    data = bytearray(records + count * RECORD_BYTES)
    data[: PAGE + len(plan)] = header(plan, identity) + plan
    taken = dict.fromkeys(pools, 0)
    for sequence, block in enumerate(blocks, start=1):
        pool = groups[block.group]["pool"]
        at, before, nbytes = pools[pool]
        number = before + taken[pool]
        start = at + taken[pool] * nbytes
        data[start : start + nbytes] = block.data
        about = block.group, len(block.key), zlib.crc32(block.data), sequence, number
        record = RECORD.pack(b"row\1", *about, block.first, block.stop, block.key)
        start = records + number * RECORD_BYTES
        data[start : start + RECORD_BYTES] = record + digest(record, identity)
        taken[pool] += 1
    path.write_bytes(data)
    path.chmod(0o600)
