"""What TLS costs on the data connections of `tcp`, compared with its parts in the same run.

`python -m benchmarks.tls_wire`: plain tcp, TLS that seals, TLS that opens, and tcp under TLS.
"""

from __future__ import annotations

import base64
import json
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from benchmarks.timing import show
from kvatlas.copying import Memory
from kvatlas.routing import Copy
from kvatlas.wire import Security, make_transport
from kvatlas.wire.secret_identity import SecretIdentity

POOL = 64 << 20
RUN = 1 << 20
RECORD = 1 << 20
SECRET = bytes(range(32))
TURNS = 9


def serve(secret: str) -> None:
    """The peer's process: registers a pool, says where, and waits."""
    pool = np.ones(POOL, np.uint8)
    transport = make_transport("tcp")
    if secret:
        transport.protect(Security(bytes.fromhex(secret)), lambda _: nullcontext())
    transport.register({0: Memory(pool.ctypes.data, POOL, owner=pool)})
    said = [base64.b64encode(transport.publish()).decode(), pool.ctypes.data]
    print(json.dumps(said), flush=True)
    sys.stdin.readline()
    transport.close()


@contextmanager
def reading(secret: bytes) -> Iterator[Callable[[], None]]:
    """A read of the peer's whole pool, in runs."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.tls_wire", "--serve", secret.hex()],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        if process.stdout is None:
            raise SystemExit("no pipe to the peer")
        metadata, address = json.loads(process.stdout.readline())
        pool, end = np.zeros(POOL, np.uint8), make_transport("tcp")
        if secret:
            end.protect(Security(secret), lambda _: nullcontext())
        end.register({0: Memory(pool.ctypes.data, POOL)})
        link = end.connect(base64.b64decode(metadata), {0: Memory(address, POOL)})
        at = np.random.default_rng(1).permutation(POOL // RUN) * RUN
        copy = Copy(0, 0, at, at, np.full(len(at), RUN))

        def read() -> None:
            handle = link.read([copy])
            handle.wait(time.monotonic() + 60)
            handle.release()

        yield read
        end.close()
        process.communicate(b"\n", timeout=30)


def sealed_and_opened() -> tuple[Callable[[], None], Callable[[], None]]:
    """Seal a pool with TLS in memory, and open what was sealed: the work of the two ends alone."""
    identity = SecretIdentity(SECRET)
    ways = [ssl.MemoryBIO() for _ in range(2)]
    server = identity.server.wrap_bio(ways[0], ways[1], server_side=True)
    client: Any = identity.client.wrap_bio(ways[1], ways[0], server_hostname=identity.name)
    done: set[ssl.SSLObject] = set()
    while len(done) < 2:
        for one in (client, server):
            try:
                one.do_handshake()
                done.add(one)
            except ssl.SSLWantReadError:
                pass
    source, target = np.ones(POOL, np.uint8), np.zeros(RECORD, np.uint8)
    sealed: list[bytes] = []

    def seal() -> None:
        sealed.clear()
        for at in range(0, POOL, RECORD):
            server.write(source[at : at + RECORD].data)
            sealed.append(ways[1].read())

    def open_all() -> None:
        for some in sealed:
            ways[1].write(some)
            left = RECORD
            while left:
                left -= client.read(left, target.data)

    return seal, open_all


def main() -> None:
    """Measure in turns, so that the machine's moods hit all alike."""
    with reading(b"") as plain, reading(SECRET) as protected:
        seal, open_all = sealed_and_opened()
        acts = {"tcp": plain, "seal": seal, "open": open_all, "tcp under TLS": protected}
        taken: dict[str, list[float]] = {name: [] for name in acts}
        for turn in range(TURNS + 1):
            for name, act in acts.items():
                begun = time.perf_counter()
                act()
                if turn:
                    taken[name].append(time.perf_counter() - begun)
    speed = {name: POOL / min(times) / 1e9 for name, times in taken.items()}
    limit = 1 / (1 / speed["tcp"] + 1 / speed["seal"] + 1 / speed["open"])
    row = [f"{speed[name]:.2f}" for name in acts]
    columns = ["GB/s", *acts, "1/(1/tcp + 1/seal + 1/open)", "of it"]
    title = f"{POOL >> 20} MiB in runs of {RUN >> 20} MiB between two processes"
    show(title, columns, [["", *row, f"{limit:.2f}", f"{speed['tcp under TLS'] / limit:.0%}"]])
    print("The bar: at least 80%.\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    else:
        main()
