"""An engine of the installed vLLM, started by tests of another release.

`make test-vllm VERSION=0.33` puts that release before the installed one, in every process that
inherits the environment. This starts an engine without it.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

from tests.vllm.engine_process import FOR_ALL, Engine, serve, until_stopped


def overlay() -> Path | None:
    """The folder with the release that runs; None if it is the installed one."""
    found = find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parents[1]
    return None if folder.name in ("site-packages", "dist-packages") else folder


class _Process:
    """A process of `subprocess`, with the methods of `multiprocessing`."""

    def __init__(self, name: str, made: subprocess.Popen[bytes]) -> None:
        self.name, self._made = name, made
        self.kill = made.kill

    @property
    def exitcode(self) -> int | None:
        return self._made.poll()

    def is_alive(self) -> bool:
        return self._made.poll() is None

    def join(self, timeout: float | None = None) -> None:
        try:
            self._made.wait(timeout)
        except subprocess.TimeoutExpired:
            return


@contextmanager
def installed_engine(
    model: Path, *, name: str, core: str, connector: dict[str, Any], folder: Path, **options: Any
) -> Iterator[Engine]:
    """Like `engine`, with the installed vLLM; `folder` is a place for a socket."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = os.pathsep.join(path for path in paths if Path(path) != overlay())
    secret = secrets.token_bytes(16)
    environment = os.environ | FOR_ALL | {"PYTHONPATH": kept, "TEST_SECRET": secret.hex()}
    environment.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with Listener(str(folder / name), authkey=secret) as listener:
        command = [sys.executable, "-m", "tests.vllm.released_engine", str(folder / name)]
        process = _Process(name, subprocess.Popen(command, env=environment))
        try:
            pipe = listener.accept()
            pipe.send((str(model), core, connector, {}, options))
            with until_stopped(pipe, process):
                made = Engine(pipe, process)
                made.started = made.facts()
                yield made
        finally:
            process.kill()
            process.join()


def main() -> None:
    secret = bytes.fromhex(os.environ.pop("TEST_SECRET"))
    with Client(sys.argv[1], authkey=secret) as pipe:
        about = pipe.recv()
        serve(pipe, *about)


if __name__ == "__main__":
    main()
