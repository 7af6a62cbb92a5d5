"""What callers of nodes and sessions pass: refused here, before a peer has to refuse it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.models import CacheIdentity
from kvatlas.wire.protocol import LONGEST_NAME


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


def checked_identity(identity: Any) -> CacheIdentity:
    """Return a cache identity, or refuse what is none.

    >>> checked_identity(None)
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: A node needs the identity of its caches. Got no identity. Pass \
identity=CacheIdentity(weights=...), or check_identity=False to exchange caches with any peer. \
[bad_config]
    """
    if isinstance(identity, CacheIdentity):
        return identity
    got = "no identity" if identity is None else repr(identity)[:100]
    raise AtlasError(
        Code.BAD_CONFIG,
        "A node needs the identity of its caches",
        got=got,
        hint="Pass identity=CacheIdentity(weights=...), or check_identity=False to exchange "
        "caches with any peer",
    )


def check_new_request(request: Any, known: Mapping[str, object]) -> None:
    """Refuse a request that is offered or expected already."""
    check_request_name(request)
    if request in known:
        problem, hint = "The request is offered or expected already", "Withdraw or forget it first"
        raise AtlasError(Code.TWICE, problem, got=request, hint=hint)


def text_list(given: Iterable[str], what: str) -> tuple[str, ...]:
    """Texts in a list, each once; a text by itself is not a list of its letters.

    >>> text_list(["a", "b", "a"], "endpoints")
    ('a', 'b')
    """
    named = None if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    if named is None or not all(isinstance(one, str) for one in named):
        problem, hint = f"The {what} are not a list of texts", "Pass a list, also of one"
        raise AtlasError(Code.BAD_CONFIG, problem, got=repr(given)[:100], hint=hint)
    return tuple(dict.fromkeys(named))


def _is_name(name: Any) -> bool:
    # As the protocol counts: characters, not bytes.
    return isinstance(name, str) and 1 <= len(name) <= LONGEST_NAME


def _shown(name: Any) -> str:
    return f"a text of {len(name)} characters" if isinstance(name, str) else repr(name)[:100]
