"""Threads that are the first to decode a type, all at once, in a process that has just begun."""

from __future__ import annotations

import subprocess
import sys

_FIRST = """
import contextlib, sys, threading
import msgspec
from kvatlas.planning import Plan
from kvatlas.wire import protocol
from kvatlas.wire.handshake_checks import check_plan_size
from kvatlas.wire.transports.errors import read_metadata
from tests.wire.helpers import small

class Inner(msgspec.Struct):
    text: str

class Outer(msgspec.Struct):
    inner: dict[int, Inner]

made = small("dense").to_json()
acts = [
    lambda: Plan.from_json(made),
    lambda: check_plan_size(made),
    lambda: msgspec.msgpack.decode(bytes([128]), type=protocol.Question),
    lambda: read_metadata(bytes([128]), Outer),
]
together = threading.Barrier(16)

def first(act):
    together.wait()
    with contextlib.suppress(Exception):
        act()

sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=first, args=(acts[n % 4],)) for n in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print("lives")
"""


def test_many_peers_may_be_the_first_to_say_hello() -> None:
    """msgspec takes the process down where two threads are the first to decode a type."""
    for _ in range(2):
        ended = subprocess.run(
            [sys.executable, "-c", _FIRST], capture_output=True, text=True, check=False
        )
        assert (ended.returncode, ended.stdout) == (0, "lives\n"), ended.stderr[-2000:]
