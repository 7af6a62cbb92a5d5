"""A producer that is struck while its memory is read: a code, and nothing that counts as here."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvatlas import Code

LOST = {
    Code.PEER_LOST, Code.DEADLINE, Code.WIRE_FAILED, Code.LEASE_EXPIRED, Code.UNKNOWN_SESSION,
}  # fmt: skip


@pytest.mark.parametrize("wire", ["cuda", "nixl"])
@pytest.mark.parametrize("strike", ["kill", "free", "withdraw"])
def test_a_producer_is_struck_in_the_middle_of_a_copy(wire: str, strike: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.struck", wire, strike],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["before"], "the copy was over before the strike"
    assert not said["ready"]
    assert said["code"] in LOST, said
    assert said["released"], "the copy is never seen to end"
