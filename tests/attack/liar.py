"""A peer that was welcomed and then sends whatever messages it likes."""

from __future__ import annotations

from typing import Any

from kvatlas.wire import protocol
from tests.wire.attacked import code_of
from tests.wire.child import Rank
from tests.wire.raw import Raw


class Liar:
    """A session that was begun with the hello of an honest rank, changed where given."""

    def __init__(self, honest: Rank, victim: Rank, **changed: Any) -> None:
        self.honest, self.victim = honest, victim
        self.raw = Raw(victim.node.endpoint, victim.node.secret)
        hello = honest.node.hello(with_plan=True)
        fields = {name: getattr(hello, name) for name in hello.__struct_fields__}
        welcome = self.raw.ask(protocol.Hello(**fields | changed))
        assert isinstance(welcome, protocol.Welcome), welcome
        self.session = welcome.session

    def open(self, direction: protocol.Direction, request: str, **changed: Any) -> Any:
        about: dict[str, Any] = {
            "session": self.session,
            "direction": direction,
            "request": request,
            "blocks": protocol.pack_tables(protocol.by_group(self.honest.blocks)),
            "start": 0,
            "stop": self.honest.tokens,
            "seconds": 5.0,
        }
        return self.raw.ask(protocol.Open(**about | changed))

    def close(self, lease: bytes, session: bytes | None = None) -> str:
        close = protocol.Close(session=session or self.session, lease=lease, complete=True)
        return code_of(self.raw.ask(close))

    def fetch(self, lease: bytes, start: int, stop: int, **about: Any) -> str:
        question = protocol.Fetch(
            session=self.session, lease=lease, start=start, stop=stop, **about
        )
        return code_of(self.raw.ask(question))

    def borrow(self, lease: bytes) -> str:
        question = protocol.Borrow(session=self.session, lease=lease, buffers=1, seconds=1.0)
        return code_of(self.raw.ask(question))
