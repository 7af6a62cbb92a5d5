"""Open the files of traces: plain, gzip or Zstandard; lines, or the elements of a JSON array."""

from __future__ import annotations

import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, cast

from kvatlas.errors import MissingExtraError
from kvatlas.simulate.traces.trace import LONGEST_LINE, Progress, bad_trace

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_BOM = b"\xef\xbb\xbf"
_PIECE = 1 << 20
_BETWEEN = re.compile(r"[\s,]*")
"""The text between two elements of an array."""
SUFFIXES = (".gz", ".zst")


@contextmanager
def opened(path: Path) -> Iterator[tuple[Any, BinaryIO]]:
    """Open a file and yield (content, file). The position in the file shows the progress.

    The compression is detected from the first bytes, so this works for pipes, too.
    """
    with path.open("rb") as file:
        first = file.peek(4)[:4]
        if first[:2] == _GZIP:
            content: Any = gzip.GzipFile(fileobj=file)
        elif first == _ZSTD:
            content = io.BufferedReader(_zstd(file))
        else:
            content = file
        try:
            yield content, file
        except _corrupt() as problem:
            raise bad_trace(
                path.name,
                "the compressed file is truncated or corrupt",
                problem,
                "Compress the trace again",
            ) from None


def _zstd(file: BinaryIO) -> Any:
    """Return a stream of the decompressed content of a Zstandard file."""
    try:
        return import_module("compression.zstd").ZstdFile(file)  # Python 3.14
    except ImportError:
        pass
    try:
        library = import_module("zstandard")
    except ImportError:
        note = ", or decompress the trace with `zstd -d`"
        raise MissingExtraError("zstandard", "traces", note) from None
    return library.ZstdDecompressor().stream_reader(file, read_across_frames=True)


def _corrupt() -> tuple[type[Exception], ...]:
    """Return the errors that the loaded libraries raise for corrupt files."""
    loaded = (sys.modules.get(name) for name in ("compression.zstd", "zstandard"))
    zstd = [library.ZstdError for library in loaded if library is not None]
    return (EOFError, gzip.BadGzipFile, zlib.error, *zstd)


def stem(path: Path) -> str:
    """Return the name of a trace: its file name without suffixes such as `.jsonl` and `.gz`.

    >>> stem(Path("monday.v2.jsonl.gz")), stem(Path("monday.v2.jsonl"))
    ('monday.v2', 'monday.v2')
    """
    return path.with_suffix("").stem if path.suffix in SUFFIXES else path.stem


class TraceFile:
    """An open file of a trace, read as lines or as the elements of a JSON array."""

    def __init__(self, path: Path, content: Any, file: BinaryIO, progress: Progress | None) -> None:
        self.name = path.name
        self._content, self._file = content, file
        self._total = max(path.stat().st_size, 1)
        self._progress = progress if file.seekable() else None

    def beginning(self) -> bytes:
        """Return some of the first bytes, which stay unread."""
        return bytes(self._content.peek(256)[:256]).removeprefix(_BOM)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the number and text of each line that is not empty."""
        number = 0
        while line := self._content.readline(LONGEST_LINE):
            number += 1
            if len(line) == LONGEST_LINE:
                raise bad_trace(
                    f"{self.name}, line {number}",
                    f"the line is too long: it must be shorter than {LONGEST_LINE:,} bytes",
                    f"{len(line):,} bytes or more",
                    "Write one request per line",
                )
            line = line.removeprefix(_BOM) if number == 1 else line
            if line.strip():
                yield number, line
            self._report(number)

    def elements(self) -> Iterator[tuple[int, bytes]]:
        """Yield the number and text of each element of a JSON array, reading it in portions."""
        decoder, number = json.JSONDecoder(), 0
        text = io.TextIOWrapper(self._content, "utf-8-sig", errors="replace")
        held = text.read(_PIECE)
        at = held.index("[") + 1
        while True:
            at = cast("re.Match[str]", _BETWEEN.match(held, at)).end()
            if held.startswith("]", at):
                return
            try:
                _, end = decoder.raw_decode(held, at)
            except (ValueError, RecursionError) as problem:
                more = text.read(max(_PIECE, len(held) - at))
                if not more or len(held) - at > LONGEST_LINE:
                    where = f"{self.name}, element {number + 1}"
                    hint = "Write an array of conversations, each shorter than 64 MiB"
                    raise bad_trace(where, "this is not valid JSON", problem, hint) from None
                held, at = held[at:] + more, 0
                continue
            number += 1
            yield number, held[at:end].encode()
            at = end
            self._report(number)

    def _report(self, number: int) -> None:
        if self._progress and not number % 256:
            self._progress(self._file.tell() / self._total)
