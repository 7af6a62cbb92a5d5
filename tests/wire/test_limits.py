"""Exhausted limits of a process: a coded error that names the limit, wherever it is met."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from multiprocessing.connection import Connection

import pytest

from kvatlas import AtlasError
from kvatlas.errors import Code
from kvatlas.routing import scattered
from kvatlas.wire import Node, Session, make_transport, memory_of, pools_for
from tests.identities import OURS
from tests.profiles import DEEP
from tests.wire.child import TOKENS, Child
from tests.wire.forking import forked
from tests.wire.processes import SOURCE, TARGET

MOST_MORE = 60
"""Descriptors after which a node, a session and a pull must have been possible."""
SECRET = bytes(range(32))


def pulled(transport: str, endpoint: str, secret: bytes | None) -> None:
    """Make a node, connect to a source, and pull, all in this process."""
    with ExitStack() as stack:
        made = make_transport(transport)
        stack.callback(made.close)
        pools = pools_for(TARGET, 0, made)
        node = Node(TARGET, memory=memory_of(pools), transport=made, identity=OURS, secret=secret)
        stack.enter_context(node)
        session = stack.enter_context(Session(node, [endpoint]))
        blocks = scattered(TARGET, TOKENS)
        # Not all of it, so that the offer goes on.
        session.pull("r", destination_blocks=blocks, tokens=TOKENS - 50, timeout=10).wait()


def pull_with_few_descriptors(
    tester: Connection, transport: str, endpoint: str, secret: bytes | None
) -> None:
    """Pull with ever more descriptors, and send what came of each attempt."""
    pulled(transport, endpoint, secret)  # everything is imported after this
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ends: Counter[str] = Counter()
    first = os.dup(0)
    os.close(first)
    for limit in range(first, first + MOST_MORE):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            pulled(transport, endpoint, secret)
        except AtlasError as refused:
            end = str(refused.code) if "ulimit -n" in refused.hint else str(refused)
        except BaseException as defect:
            end = f"{type(defect).__name__}: {defect}"
        else:
            end = "ready"
        ends[end] += 1
        if ends["ready"] == 10 and not DEEP:  # further descriptors make no difference
            break
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    tester.send(dict(ends))


@pytest.mark.parametrize(
    ("transport", "secret"), [("tcp", None), ("shm", None), ("tcp", SECRET)],
    ids=["tcp", "shm", "tls"],
)  # fmt: skip
def test_too_few_descriptors_are_named_wherever_they_run_out(
    transport: str, secret: bytes | None
) -> None:
    given = {} if secret is None else {"secret": secret.hex()}
    child = Child().start(SOURCE, transport, 1, name="source", **given)
    child.ask("offer", request="r", timeout=600)
    process, pipe = forked(pull_with_few_descriptors, transport, child.endpoint, secret)
    try:
        assert pipe.poll(120)
        ends = pipe.recv()
    finally:
        process.kill()
        process.join()
        child.close()
    assert set(ends) == {"ready", str(Code.TOO_MANY_FILES)}, ends
    assert ends[str(Code.TOO_MANY_FILES)] > 5


def make_with_few_descriptors(tester: Connection, transport: str) -> None:
    """Make transports with ever more descriptors, and send what came of each attempt."""
    make_transport(transport).close()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ends: Counter[str] = Counter()
    first = os.dup(0)
    os.close(first)
    for limit in range(first, first + 100, 9):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            make_transport(transport).close()
        except AtlasError as refused:
            ends[str(refused.code)] += 1
        else:
            ends["made"] += 1
    tester.send(dict(ends))


@pytest.mark.parametrize("library", ["mooncake", "nixl"])
def test_libraries_are_not_called_without_descriptors(library: str) -> None:
    """UCX would abort the process, and Mooncake would report another problem."""
    pytest.importorskip("mooncake.engine" if library == "mooncake" else library)
    process, pipe = forked(make_with_few_descriptors, library)
    try:
        assert pipe.poll(60)
        ends = pipe.recv()
    finally:
        process.kill()
        process.join()
    assert set(ends) == {"made", str(Code.TOO_MANY_FILES)}, ends


FULL = """
import os
from kvatlas import AtlasError
from kvatlas.wire import make_transport
from kvatlas.wire.transports.errors import coded_limits

shared = make_transport("shm")
pool = shared.allocate(1 << 20)  # it is not in /dev/shm, and needs no room there
pool[:] = 7
shared.close()
try:
    with open("/dev/shm/pools", "wb") as disk, coded_limits():
        os.posix_fallocate(disk.fileno(), 0, 1 << 20)
except AtlasError as refused:
    print(refused.code, refused.hint)
"""


def test_a_full_dev_shm_is_a_coded_error() -> None:
    """In a mount namespace of its own, with a /dev/shm of 64 KiB."""
    mounted = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-m", "sh", "-c", mounted]).returncode:
        pytest.skip("this process may not mount")
    script = f'{mounted} && exec "$0" -c "$1"'
    command = [unshare, "-m", "sh", "-c", script, sys.executable, FULL]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("not_enough_memory Free memory")
