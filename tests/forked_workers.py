"""A pytest plugin that collects tests once, and runs them in processes forked afterwards.

Collection imports torch, transformers and all tests, which takes twenty seconds of one core. Here
one process does it for all workers, which share its memory, so there can be more workers than
cores: tests of transfers, stores and attacks mostly wait. Other tests run in workers of low
priority, so that they use the time that waiting tests leave, and delay none of them.

    python -m pytest -p tests.forked_workers --forked

A worker takes batches of tests of one file, preferably of the file that it has begun, so that most
fixtures of modules are set up once.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
import traceback
import warnings
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

WAITING = ("tests/attack/", "tests/handover/", "tests/tier/", "tests/wire/")
"""Folders of tests that mostly wait, for processes that are started, stopped or killed."""
_STATUS = pytest.StashKey[int]()
_WAITERS = 3
"""Workers for these tests, besides one for each core."""
_BATCH = 12
"""The most tests that a worker takes at once."""
_LOW = 10
"""What `nice` adds in a worker from its first test on that does not wait."""
_LAST_SECONDS = 60.0
"""Seconds in which a worker tears down its last fixtures."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forked", action="store_true", help="run tests in forked processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests that were collected, where pytest would run them itself."""
    options = session.config.option
    if not options.forked or session.testsfailed or options.collectonly or not session.items:
        return None
    Workers(session).run()
    return True


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End at once: torch and Triton take seconds to end, and list what they leave behind."""
    if config.stash.get(_STATUS, None) is not None:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[_STATUS])


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Note with what the process ends."""
    if session.config.option.forked:
        session.config.stash[_STATUS] = int(exitstatus)


class Queue:
    """The tests that no worker has taken, in batches by file."""

    def __init__(self, files: Sequence[str]) -> None:
        """Begin with test number i in file `files[i]`."""
        numbers = defaultdict[str, list[int]](list)
        for number, file in enumerate(files):
            numbers[file].append(number)
        self.left = {
            file: deque(own[at : at + _BATCH] for at in range(0, len(own), _BATCH))
            for file, own in numbers.items()
        }
        self._begun = set[str]()

    def take(self, before: str, *, waiting: bool) -> tuple[str, list[int]]:
        """Return the next batch and its file, for a worker whose last one was of file `before`.

        The worker prefers tests that mostly wait, or others; a file that is new to every worker;
        and of those that were begun, the one with the most tests.
        """
        if not self.left:
            return "", []

        def order(file: str) -> tuple[bool, bool, int]:
            begun = file in self._begun
            return file.startswith(WAITING) is not waiting, begun, -len(self.left[file]) * begun

        file = before if before in self.left else min(self.left, key=order)
        self._begun.add(file)
        batch = self.left[file].popleft()
        if not self.left[file]:
            del self.left[file]
        return file, batch

    def put_back(self, file: str, batch: list[int]) -> None:
        """Return tests that a worker took and did not run."""
        self.left.setdefault(file, deque()).appendleft(batch)


class Worker:
    """A forked process, from the side of the one that forked it."""

    def __init__(
        self, session: pytest.Session, others: Sequence[Connection], *, waiting: bool
    ) -> None:
        self.waiting, self.file = waiting, ""
        self.taken = deque[tuple[str, int]]()
        """File and number of the tests that it has and has not finished, in their order."""
        self.pipe, there = Pipe()
        self._pid = os.fork()
        if not self._pid:
            for pipe in (self.pipe, *others):
                pipe.close()
            _work(session, there)
        there.close()

    def give(self, queue: Queue) -> None:
        """Send the next batch, or none if no test is left."""
        self.file, batch = queue.take(self.file, waiting=self.waiting)
        self.taken += [(self.file, number) for number in batch]
        with suppress(OSError):  # if it has ended, that is noticed next
            self.pipe.send(batch)

    def ended(self) -> int:
        """Wait until the process has ended, and return its exit code."""
        deadline = time.monotonic() + _LAST_SECONDS
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        return self.kill()

    def kill(self) -> int:
        """End the process, and return its exit code."""
        os.kill(self._pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


class Workers:
    """All workers, and the reports that they send."""

    def __init__(self, session: pytest.Session) -> None:
        self.session, self.hook = session, session.config.hook
        self.queue = Queue([item.nodeid.partition("::")[0] for item in session.items])
        self.all = dict[Connection, Worker]()

    def run(self) -> None:
        """Run all tests; raise what pytest raises if it is to stop earlier."""
        waiting = any(file.startswith(WAITING) for file in self.queue.left)
        kinds = [True] * _WAITERS * waiting + [False] * (os.cpu_count() or 1)
        batches = sum(map(len, self.queue.left.values()))
        try:
            for waits in kinds[:batches]:
                self._start(waiting=waits)
            while self.all:
                for pipe in wait(list(self.all)):
                    assert isinstance(pipe, Connection)
                    self._hear(self.all[pipe])
                    if self.session.shouldfail:
                        raise self.session.Failed(self.session.shouldfail)
                    if self.session.shouldstop:
                        raise self.session.Interrupted(self.session.shouldstop)
        finally:
            for worker in self.all.values():
                worker.kill()

    def _start(self, *, waiting: bool) -> None:
        worker = Worker(self.session, list(self.all), waiting=waiting)
        self.all[worker.pipe] = worker

    def _hear(self, worker: Worker) -> None:
        config = self.session.config
        what, about = "ended", None
        with suppress(EOFError, ConnectionResetError):
            what, about = worker.pipe.recv()
        match what:
            case "next":
                worker.give(self.queue)
            case "report":
                report = self.hook.pytest_report_from_serializable(config=config, data=about)
                self.hook.pytest_runtest_logreport(report=report)
            case "warning":
                self.hook.pytest_warning_recorded.call_historic(kwargs=about)
            case "finished":
                worker.taken.popleft()
            case "ended":
                del self.all[worker.pipe]
                self._ended(worker, worker.ended())
            case "error":
                raise RuntimeError(f"A worker failed:\n{about}")

    def _ended(self, worker: Worker, code: int) -> None:
        """Report the test in which a worker has ended; another one goes on with those after it."""
        if not worker.taken:
            assert code == 0, f"A worker ended with {code} after its last test."
            return
        _, number = worker.taken.popleft()
        item, why = self.session.items[number], f"The process of this test ended with {code}."
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
        self.hook.pytest_runtest_logreport(report=report)
        batches = defaultdict[str, list[int]](list)
        for file, number in worker.taken:
            batches[file].append(number)
        for file, batch in batches.items():
            self.queue.put_back(file, batch)
        self._start(waiting=worker.waiting)


class Sender:
    """The plugin by which a worker sends what happens in its tests."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self._config, self._pipe = config, pipe
        self.registered = False
        """Until then, pytest repeats earlier warnings, which the first process has."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        to_data = self._config.hook.pytest_report_to_serializable
        self._pipe.send(("report", to_data(config=self._config, report=report)))

    def pytest_runtest_logfinish(self) -> None:
        self._pipe.send(("finished", None))

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        if not self.registered:
            return
        about: dict[str, Any] = {"when": when, "nodeid": nodeid, "location": location}
        about["warning_message"] = warnings.WarningMessage(  # its message may not be sent as it is
            UserWarning(str(warning_message.message)),
            warning_message.category,
            warning_message.filename,
            warning_message.lineno,
        )
        self._pipe.send(("warning", about))


def _work(session: pytest.Session, pipe: Connection) -> None:
    """Run batches until none is left, and end the process."""
    code = 1
    try:
        manager = session.config.pluginmanager
        manager.unregister(name="terminalreporter")
        sender = Sender(session.config, pipe)
        manager.register(sender)
        sender.registered = True
        capture: Any = manager.getplugin("capturemanager")
        if capture is not None:  # it writes to files that all workers would share
            capture.stop_global_capturing()
            # Libraries write between tests too, when nothing is captured.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            capture.start_global_capturing()
        following, low = _next(pipe), False
        while following:
            batch, following = following, []
            if not low and not session.items[batch[0]].nodeid.startswith(WAITING):
                os.nice(_LOW)
                low = True
            for at, number in enumerate(batch):
                if at == len(batch) - 1:
                    following = _next(pipe)
                after = [session.items[one] for one in (batch[at + 1 :] or following)[:1]]
                session.config.hook.pytest_runtest_protocol(
                    item=session.items[number], nextitem=after[0] if after else None
                )
        atexit._run_exitfuncs()
        code = 0
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
    finally:
        os._exit(code)


def _next(pipe: Connection) -> list[int]:
    pipe.send(("next", None))
    batch: list[int] = pipe.recv()
    return batch
