"""Transports between hosts, as parameters of tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

import pytest

from tests.hosts.sites import Way

_INSTALLED = [name for name in ("nixl", "mooncake") if importlib.util.find_spec(name)]

TCP = [Way("tcp", 1), Way("tcp", 2)]
OTHERS = [Way(name, 2) for name in _INSTALLED]
"""Transports of other libraries that can use a given device or address."""


_STRUCK = [
    (Way("tcp", 1), "direct"),
    (Way("tcp", 2), "staged"),
    (Way("nixl", 2), "direct"),
    (Way("mooncake", 2), "staged"),
]


def struck(*transports: str) -> pytest.MarkDecorator:
    """Run a test that takes tens of seconds once for each transport, source plan and `how`."""
    wanted = set(transports or ("tcp", *_INSTALLED))
    chosen = [(way, how) for way, how in _STRUCK if way.transport in wanted]
    ids = [f"{how}-{way.transport}-tp{way.ranks}" for way, how in chosen]
    return pytest.mark.parametrize(("way", "how"), chosen, ids=ids)


def over(ways: Iterable[Way]) -> pytest.MarkDecorator:
    """Run a test once for each way."""
    return pytest.mark.parametrize("way", ways, ids=lambda way: f"{way.transport}-tp{way.ranks}")
