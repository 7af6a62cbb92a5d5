"""Addresses of tiers in messages, without the credentials that they may contain."""

from __future__ import annotations

import re
from pathlib import Path

_HIDDEN = "..."
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?!//)")
_HOST = re.compile(r"[\w.,~-]*(:\d*)?|\[[0-9A-Fa-f:.]*\](:\d*)?")


def without_secrets(where: str | Path) -> str:
    """Return the address of a tier without user, password and options, for logs and errors.

    Paths of files are returned unchanged. If it is unclear which part of an address is the
    password, everything after the scheme is left out.

    >>> without_secrets("redis://user:password@10.0.0.1:6379/0?timeout=2")
    'redis://10.0.0.1:6379/0'
    >>> without_secrets("s3://bucket/prefix?secret_access_key=abc")
    's3://bucket/prefix'
    >>> without_secrets("/var/cache/prefixes.tier")
    '/var/cache/prefixes.tier'
    """
    text = str(where)
    scheme, found, rest = text.partition("://")
    if not found:
        begun = _SCHEME.match(text)
        return f"{begun[1]}:{_HIDDEN}" if begun else text
    rest = rest.partition("?")[0]
    if not rest.startswith("/"):  # without a host there is no user, and a path may contain "@"
        rest = rest.rpartition("@")[2]
        if not _HOST.fullmatch(rest.partition("#")[0].partition("/")[0]):
            rest = _HIDDEN
    return f"{scheme}://{rest.partition('#')[0]}"
