"""What callers of nodes and sessions pass: refused here, before a peer has to refuse it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.wire.protocol import LONGEST_NAME, MOST_SECONDS


def check_node_name(name: Any) -> None:
    """Refuse a node's name that peers would not take.

    >>> check_node_name("decode-0")
    >>> check_node_name("x" * 257)
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: The name of a node is not a text of 1 to 256 characters. \
Got a text of 257 characters. Use the host's name and the rank's number. [bad_config]
    """
    if not _is_name(name):
        problem = f"The name of a node is not a text of 1 to {LONGEST_NAME} characters"
        hint = "Use the host's name and the rank's number"
        raise AtlasError(Code.BAD_CONFIG, problem, got=_shown(name), hint=hint)


def check_request_name(request: Any) -> None:
    """Refuse a request's name that peers would not take."""
    if not _is_name(request):
        problem = f"The name of a request is not a text of 1 to {LONGEST_NAME} characters"
        hint = "Use the engine's request id"
        raise AtlasError(Code.UNKNOWN_REQUEST, problem, got=_shown(request), hint=hint)


def check_new_request(request: Any, known: Mapping[str, object]) -> None:
    """Refuse a request that is offered or expected already."""
    check_request_name(request)
    if request in known:
        problem, hint = "The request is offered or expected already", "Withdraw or forget it first"
        raise AtlasError(Code.TWICE, problem, got=request, hint=hint)


def checked_seconds(seconds: Any, most: float = MOST_SECONDS) -> float:
    """How long something may take; no time at all where less than none is left.

    >>> checked_seconds(30), checked_seconds(-0.5)
    (30.0, 0.0)
    >>> checked_seconds(float("nan"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: This is no number of seconds from 0 to 86,400. Got nan...
    """
    number = isinstance(seconds, Real) and not isinstance(seconds, bool)
    if not number or math.isnan(seconds) or seconds > most:
        problem = f"This is no number of seconds from 0 to {most:,}"
        hint = "Pass a number; what takes longer is asked for again"
        raise AtlasError(Code.BAD_QUANTITY, problem, got=repr(seconds)[:100], hint=hint)
    return max(0.0, float(seconds))


def _is_name(name: Any) -> bool:
    # As the protocol counts: characters, not bytes.
    return isinstance(name, str) and 1 <= len(name) <= LONGEST_NAME


def _shown(name: Any) -> str:
    return f"a text of {len(name)} characters" if isinstance(name, str) else repr(name)[:100]
