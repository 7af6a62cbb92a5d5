"""Peers that mean harm, against a live node: what they may cost, and an honest peer beside them.

A message may cost a second of the processor and 64 MiB, whatever it claims. After each
attack the node serves an honest peer.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvatlas.wire import protocol
from tests.wire.corpus.make import hello
from tests.wire.helpers import End, pull_all
from tests.wire.raw import Raw

SECONDS = 1.0
BYTES = 64 << 20


class Attacked:
    """A node that is attacked, an honest peer of it, and a session of the attacker."""

    def __init__(self, source: End, target: End) -> None:
        self.source, self.target = source, target
        self.node = source.nodes[0]
        self.raw = Raw(self.node.endpoint, self.node.secret)
        self.rounds = 0

    def session(self, **changed: Any) -> bytes:
        welcome = self.raw.ask(greeting(**changed))
        assert isinstance(welcome, protocol.Welcome)
        return welcome.session

    def open(self, session: bytes, **changed: Any) -> Any:
        return self.raw.ask(opening(session, **changed))

    def borrow(self, session: bytes, lease: bytes, **changed: Any) -> Any:
        about: dict[str, Any] = {"buffers": 2, "seconds": 1.0} | changed
        return self.raw.ask(protocol.Borrow(session=session, lease=lease, **about))

    def works(self) -> None:
        """An honest peer gets its bytes, and everything is as it was."""
        self.rounds += 1
        self.source.offer(f"honest {self.rounds}")
        pull_all(self.source, self.target, f"honest {self.rounds}", how="staged", checksums=True)
        for buffers in self.target.buffers:
            for index, whole in buffers.whole.items():
                whole[:] = buffers.before[index]


def greeting(**changed: Any) -> protocol.Hello:
    return msgspec.convert(hello(**changed), protocol.Hello)


def opening(session: bytes, **changed: Any) -> protocol.Open:
    about: dict[str, Any] = {
        "session": session, "direction": "pull", "request": "secret", "start": 0, "stop": 50,
        "blocks": protocol.pack_tables({0: [3, 2, 1, 0]}), "seconds": 5.0,
    }  # fmt: skip
    return protocol.Open(**about | changed)


def code_of(said: Any) -> str:
    if said is None:
        return "nothing"
    return said.code if isinstance(said, protocol.Refusal) else str(said.__struct_config__.tag)
