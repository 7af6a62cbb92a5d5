"""The two engines of a diagnosis, and findings about them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from kvatlas.engines.vllm.engine_arguments import EngineArguments
from kvatlas.engines.vllm.settings import ConnectorSettings
from kvatlas.engines.vllm.transfer_keys import EXTRA, unknown_transfer_key
from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan

_NO_MODEL = (Code.UNKNOWN_MODEL, Code.UNREADABLE)

Verdict = Literal["ok", "look", "no"]


@dataclass(frozen=True)
class Finding:
    """The result of one check: the values of both engines, a verdict and the reason."""

    what: str
    prefill: str
    decode: str
    verdict: Verdict = "ok"
    why: str = ""


def finding(what: str, said: Iterable[str], verdict: Verdict = "ok", why: str = "") -> Finding:
    """Return a finding about `what`. `said` contains the values of prefill and decode engine."""
    prefill, decode = said
    return Finding(what, prefill, decode, verdict, why)


class EngineEnd:
    """One of the two engines: its plan, and its connector settings if they were given."""

    def __init__(self, given: EngineArguments | Plan) -> None:
        self.arguments = given if isinstance(given, EngineArguments) else None
        self.plan = given if isinstance(given, Plan) else None
        self.refusal: AtlasError | None = None
        self.settings: ConnectorSettings | None = None
        self.bad_settings = ""
        """The reason against the connector's settings; empty if they are valid."""
        if self.arguments is None:
            return
        try:
            self.plan = self.arguments.plan()
        except AtlasError as refusal:
            if refusal.code in _NO_MODEL:
                raise
            self.refusal = refusal
        if self.transfer:
            self._read_settings()

    def _read_settings(self) -> None:
        known = ConnectorSettings.__struct_fields__
        self.bad_settings = unknown_transfer_key(self.transfer, known)
        if self.bad_settings:
            return
        try:
            self.settings = ConnectorSettings.read(self.transfer.get(EXTRA))
        except AtlasError as refusal:
            self.bad_settings = f"{refusal.problem}: {refusal.got}. {refusal.hint}"

    @property
    def transfer(self) -> dict[str, Any]:
        """The engine's `kv_transfer_config`; empty if not given."""
        return (self.arguments.kv_transfer_config if self.arguments else None) or {}

    @property
    def reachable(self) -> str:
        """The host that the engine advertises to its peers."""
        assert self.settings is not None  # noqa: S101
        return self.settings.reachable

    @property
    def local(self) -> bool:
        """Whether the engine can be reached from its own host only."""
        assert self.settings is not None  # noqa: S101
        return self.settings.local


Ends = tuple[EngineEnd, EngineEnd]
