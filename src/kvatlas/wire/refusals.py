"""Errors as messages: a node sends an error to the peer whose request failed, which raises it."""

from __future__ import annotations

from typing import NoReturn

from kvatlas.errors import AtlasError, Code
from kvatlas.wire.protocol import Refusal


class BusyError(AtlasError):
    """The node is busy. The peer may send its request again after `retry` seconds."""

    def __init__(self, got: str, retry: float) -> None:
        super().__init__(Code.BUSY, got=got, hint=f"Retry after {retry:g} s")
        self.retry = retry


def refusal_of(error: AtlasError) -> Refusal:
    """Return an error as a message to the peer whose request failed."""
    texts = [str(text)[:4096] for text in (error.problem, error.got, error.hint)]
    retry = error.retry if isinstance(error, BusyError) else 0.0
    return Refusal(code=str(error.code), problem=texts[0], got=texts[1], hint=texts[2], retry=retry)


def lease_expired() -> AtlasError:
    """Return the error for a lease that has ended or never existed."""
    return AtlasError(
        Code.LEASE_EXPIRED,
        got="a lease that is not open",
        hint="Retry with a longer time limit",
    )


def raise_refusal(refusal: Refusal) -> NoReturn:
    """Raise an error that a peer sent. An unknown code becomes `wire_failed`."""
    known = {str(code): code for code in Code}
    code = known.get(refusal.code, Code.WIRE_FAILED)
    raise AtlasError(
        code, refusal.problem, got=f"{refusal.got} (reported by the peer)", hint=refusal.hint
    )
