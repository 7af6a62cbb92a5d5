"""Network namespaces: make them, enter them, and delete them whatever happens to the tests.

Every namespace has a name that starts with `kvatlas-` and the process id of the test run. A run
deletes its namespaces when it exits, and deletes at its start those of runs that no longer exist.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import signal
import subprocess
from contextlib import suppress
from itertools import count
from pathlib import Path

_PREFIX = "kvatlas"
_FOLDER = Path("/var/run/netns")
_TUN = Path("/dev/net/tun")
_SEARCHED = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000
_MS_SLAVE_ALL, _MNT_DETACH = (1 << 14) | (1 << 19), 2

_numbers = count()
_made: list[str] = []


def run(program: str, *words: str) -> str:
    """Run `ip` or `tc`, and return its output. An error contains the command and its message."""
    found = _found(program)
    done = subprocess.run([found, *words], capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise OSError(f"{program} {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _found(program: str) -> str:
    found = shutil.which(program, path=_SEARCHED)
    if found is None:
        raise FileNotFoundError(f"{program} is not installed; install the package iproute2")
    return found


def inside(name: str, *command: str) -> list[str]:
    """Return the words that run a command in a namespace."""
    return [_found("ip"), "netns", "exec", name, *command]


def run_ip(*words: str) -> str:
    """Run `ip` with these words."""
    return run("ip", *words)


def why_not() -> str:
    """Return why this process cannot make namespaces with devices; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not os.access(_TUN, os.R_OK | os.W_OK):
        return f"{_TUN} cannot be opened"
    try:
        run("tc", "-Version")
        name = make("probe")
        try:
            run_ip("-n", name, "link", "add", "one", "type", "veth", "peer", "name", "two")
            run_ip("-n", name, "link", "add", "bridge", "type", "bridge")
            run("tc", "-n", name, *tbf("one", "1mbit"))
        finally:
            delete(name)
    except OSError as problem:
        return str(problem)
    return ""


def tbf(device: str, rate: str) -> list[str]:
    """The words after `tc` that limit what a device sends to a rate."""
    limit = ["rate", rate, "burst", "32kb", "latency", "200ms"]
    return ["qdisc", "replace", "dev", device, "root", "tbf", *limit]


def make(label: str) -> str:
    """Make a namespace, and return its name. Its loopback device is up."""
    name = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}-{label}"
    run_ip("netns", "add", name)
    _made.append(name)
    run_ip("-n", name, "link", "set", "lo", "up")
    return name


def delete(name: str) -> None:
    """Kill the processes in a namespace and delete it, with its devices."""
    with suppress(OSError):
        for pid in run_ip("netns", "pids", name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    with suppress(OSError):
        run_ip("netns", "delete", name)
    if name in _made:
        _made.remove(name)


def sweep() -> None:
    """Delete namespaces of test runs whose process no longer exists."""
    for path in _FOLDER.glob(f"{_PREFIX}-*-*-*"):
        pid = path.name.split("-")[1]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            delete(path.name)


@atexit.register
def _delete_all() -> None:
    for name in _made:
        delete(name)


def enter(name: str) -> None:
    """Move this process, which must have one thread, into a namespace, as `ip netns exec` does.

    `/sys` is mounted again because it shows the devices of the namespace that mounted it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with (_FOLDER / name).open() as opened:
        _check(libc.setns(opened.fileno(), _CLONE_NEWNET), "setns")
    _check(libc.unshare(_CLONE_NEWNS), "unshare")
    _check(libc.mount(b"", b"/", b"none", ctypes.c_ulong(_MS_SLAVE_ALL), None), "mount /")
    _check(libc.umount2(b"/sys", _MNT_DETACH), "umount /sys")
    _check(libc.mount(name.encode(), b"/sys", b"sysfs", ctypes.c_ulong(0), None), "mount /sys")


def _check(answer: int, call: str) -> None:
    if answer != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
