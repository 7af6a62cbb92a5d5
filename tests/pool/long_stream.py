"""Traces that are as long as asked for, out of a pipe: `make test-stream GIGABYTES=10`.

Prompts as token ids, and ids in Mooncake's format, are read to the end. Memory grows with the ids
only: by at most 60 bytes for each, if all are distinct.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from kvatlas.simulate import read_trace

TOKENS = 3_000
"""Of a prompt: a line of about 20 KB."""
_PROMPT = ",".join(str(100_000 + n) for n in range(TOKENS - 1))


def token_line(number: int) -> bytes:
    """A prompt that no other begins with."""
    return f'{{"token_ids":[{number},{_PROMPT}]}}\n'.encode()


def mooncake_line(number: int) -> bytes:
    """The same in Mooncake's form, in blocks of 16 tokens."""
    first = number * (TOKENS // 16)
    ids = ",".join(map(str, range(first, first + TOKENS // 16)))
    return f'{{"input_length":{TOKENS // 16 * 16},"hash_ids":[{ids}],"block_size":16}}\n'.encode()


def write_lines(path: Path, line: Callable[[int], bytes], nbytes: int) -> None:
    """So many bytes of lines, or one line more."""
    with path.open("wb", buffering=1 << 20) as file:
        done = number = 0
        while done < nbytes:
            number += 1
            done += file.write(line(number))


@contextmanager
def pipe_of(line: Callable[[int], bytes], nbytes: int) -> Iterator[Path]:
    """A pipe that another process writes lines to, until nobody reads them."""
    with TemporaryDirectory() as folder:
        pipe = Path(folder, "stream.jsonl")
        os.mkfifo(pipe)
        writer = get_context("fork").Process(target=write_lines, args=(pipe, line, nbytes))
        writer.start()
        yield pipe
        writer.terminate()
        writer.join()


def most_memory() -> float:
    """The most MB that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Read both forms."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    nbytes = int(parser.parse_args().gigabytes * 1e9)
    before, start = most_memory(), time.monotonic()
    with pipe_of(token_line, nbytes) as pipe:
        trace = read_trace(pipe, block=512)
    took, more = time.monotonic() - start, most_memory() - before
    print(f"{nbytes / 1e9:g} GB of token ids: {len(trace):,} requests, {trace.tokens:,} tokens, "
          f"{took:.0f} s, {more:.0f} MB more at most for {len(trace.ids):,} ids")  # fmt: skip
    assert trace.tokens > nbytes // 8
    assert more < 64 + 60 * len(trace.ids) / 1e6
    before, start = most_memory(), time.monotonic()
    with pipe_of(mooncake_line, nbytes) as pipe:
        trace = read_trace(pipe)
    took, more = time.monotonic() - start, most_memory() - before
    print(f"{nbytes / 1e9:g} GB in Mooncake's format: {len(trace.ids):,} distinct ids, "
          f"{took:.0f} s, {more:.0f} MB more at most")  # fmt: skip
    assert more < 64 + 60 * len(trace.ids) / 1e6
    print(f"{most_memory():.0f} MB at most in all")


if __name__ == "__main__":
    main()
