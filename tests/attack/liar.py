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
        self.announced = 0

    def open(self, request: str, **changed: Any) -> Any:
        about: dict[str, Any] = {
            "session": self.session,
            "direction": "pull",
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

    def announce(self, request: str, **changed: Any) -> str:
        """Announce a push once, by default of something that is not offered."""
        self.announced += 1
        about: dict[str, Any] = {
            "session": self.session,
            "request": request,
            "offer": f"nothing {self.announced}",
            "endpoint": self.honest.node.endpoint,
            "start": 0,
            "stop": self.honest.tokens,
            "seconds": 5.0,
        }
        return code_of(self.raw.ask(protocol.Announce(**about | changed)))

    def announced_until_over(self, request: str, **changed: Any) -> str:
        """Announce a push again and again until it is refused; `announced` if it never is."""
        changed = {"offer": f"nothing {self.announced}"} | changed
        said = ["announced"]
        while len(said) < 100 and said[-1] in ("announced", "busy"):
            said.append(self.announce(request, **changed))
        return said[-1]
