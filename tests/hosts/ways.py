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


MIXED = pytest.mark.parametrize(
    ("way", "how"),
    [(TCP[0], "direct"), (TCP[1], "staged")],
    ids=["direct-tcp-tp1", "staged-tcp-tp2"],
)
"""Faults that take tens of seconds: each source plan and each way to read, in two runs."""


def over(ways: Iterable[Way]) -> pytest.MarkDecorator:
    """Run a test once for each way."""
    return pytest.mark.parametrize("way", ways, ids=lambda way: f"{way.transport}-tp{way.ranks}")
