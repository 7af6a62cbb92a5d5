"""Errors on the wire: a node sends an error to the peer that caused it, which raises it."""

from __future__ import annotations

from typing import NoReturn

from kvatlas.errors import AtlasError, Code
from kvatlas.wire.protocol import Refusal


class BusyError(AtlasError):
    """The node is busy. The peer may ask again after `retry` seconds."""

    def __init__(self, got: str, retry: float) -> None:
        super().__init__(Code.BUSY, got=got, hint=f"Retry after {retry:g} s")
        self.retry = retry


def refusal_of(error: AtlasError) -> Refusal:
    """Return an error as the message that is sent to the peer that caused it."""
    texts = [str(text)[:4096] for text in (error.problem, error.got, error.hint)]
    retry = error.retry if isinstance(error, BusyError) else 0.0
    return Refusal(code=str(error.code), problem=texts[0], got=texts[1], hint=texts[2], retry=retry)


def lease_expired() -> AtlasError:
    """The error for a lease that has ended or never existed."""
    return AtlasError(
        Code.LEASE_EXPIRED,
        got="a lease that is not open",
        hint="Retry with a longer time limit",
    )


def raise_refusal(refusal: Refusal) -> NoReturn:
    """Raise an error that a peer sent, with the peer's error code."""
    known = {str(code): code for code in Code}
    code = known.get(refusal.code, Code.WIRE_FAILED)
    raise AtlasError(
        code, refusal.problem, got=f"{refusal.got} (reported by the peer)", hint=refusal.hint
    )
