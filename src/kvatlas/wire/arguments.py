"""Check the arguments of nodes and sessions before anything is sent to a peer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.models import CacheIdentity
from kvatlas.wire.protocol import LONGEST_NAME


def check_node_name(name: Any) -> None:
    """Raise `bad_config` for a node name that peers would not accept.

    >>> check_node_name("decode-0")
    >>> check_node_name("x" * 257)
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: A node name must be a string of 1 to 256 characters. \
Got a string of 257 characters. Use the host's name and the rank's number. [bad_config]
    """
    _check_name(name, "node", Code.BAD_CONFIG, "Use the host's name and the rank's number")


def check_request_name(request: Any) -> None:
    """Raise `unknown_request` for a request name that peers would not accept."""
    _check_name(request, "request", Code.UNKNOWN_REQUEST, "Use the engine's request id")


def _check_name(name: Any, what: str, code: Code, hint: str) -> None:
    is_text = isinstance(name, str)
    # The protocol limits characters, not bytes.
    if not is_text or not 1 <= len(name) <= LONGEST_NAME:
        problem = f"A {what} name must be a string of 1 to {LONGEST_NAME} characters"
        got = f"a string of {len(name)} characters" if is_text else repr(name)[:100]
        raise AtlasError(code, problem, got=got, hint=hint)


def checked_identity(identity: Any) -> CacheIdentity:
    """Return the cache identity, or raise `bad_config` if it is not a `CacheIdentity`.

    >>> checked_identity(None)
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: The identity of caches must be a CacheIdentity. Got no identity. \
Pass identity=CacheIdentity(weights=...), or check_identity=False to exchange caches with any \
peer. [bad_config]
    """
    if isinstance(identity, CacheIdentity):
        return identity
    raise AtlasError(
        Code.BAD_CONFIG,
        "The identity of caches must be a CacheIdentity",
        got="no identity" if identity is None else repr(identity)[:100],
        hint="Pass identity=CacheIdentity(weights=...), or check_identity=False to exchange "
        "caches with any peer",
    )


def check_new_request(request: Any, known: Mapping[str, object]) -> None:
    """Raise `twice` if `known` (the offered and expected requests) contains the request."""
    check_request_name(request)
    if request in known:
        problem = "The request is already offered or expected"
        hint = "Withdraw the offer or forget the request first, or use another request name"
        raise AtlasError(Code.TWICE, problem, got=f"request {request!r}", hint=hint)


def text_list(given: Iterable[str], what: str) -> tuple[str, ...]:
    """Return a list of strings as a tuple without duplicates.

    Raise `bad_config` for anything else, such as a single string. `what` is the name of the list
    in the error message.

    >>> text_list(["a", "b", "a"], "endpoints")
    ('a', 'b')
    """
    named = None if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    if named is None or not all(isinstance(one, str) for one in named):
        problem = f"The {what} must be a list of strings"
        hint = "Pass a list of strings, even if there is only one string"
        raise AtlasError(Code.BAD_CONFIG, problem, got=repr(given)[:100], hint=hint)
    return tuple(dict.fromkeys(named))
