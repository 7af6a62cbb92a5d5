"""Processes for tests, forked from a server that has imported what they need.

Nothing has run in that server, so that a test can afford many processes.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HAS_NIXL = importlib.util.find_spec("nixl") is not None
# The package `nixl` itself would import all of torch.
_NIXL = [f"{name}._api" for name in ("nixl_cu13", "nixl_cu12") if importlib.util.find_spec(name)]
FORKED = get_context("forkserver")
FORKED.set_forkserver_preload(
    ["tests.wire.child", "tests.wire.transports.peer", *(_NIXL if len(_NIXL) == 1 else [])]
)


def forked(target: Callable[..., None], *arguments: Any) -> tuple[Any, Any]:
    """A process that runs `target(connection, *arguments)`, and the other end of the connection."""
    here, there = FORKED.Pipe()
    process = FORKED.Process(target=target, args=(there, *arguments), daemon=True)
    process.start()
    there.close()
    return process, here


def until_stopped(pid: int) -> None:
    """Wait until a process that was sent SIGSTOP stands still, all its threads included."""
    deadline = time.monotonic() + 5
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    while any((task / "stat").read_text().rpartition(")")[2].split()[0] != "T" for task in tasks):
        assert time.monotonic() < deadline, "it does not stop"
        time.sleep(0.001)


def forked_idler() -> int:
    """Fork a process that does nothing, and return its number once it runs.

    It has then closed what it closes after a fork, and has all else that its parent has.
    """
    runs, running = os.pipe()
    child = os.fork()
    if not child:
        os.write(running, b"x")
        while True:
            signal.pause()
    os.read(runs, 1)
    os.close(runs)
    os.close(running)
    return child
