"""One browser for all tests of the page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.page.browser import Browser, NoBrowserError, chromium


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    try:
        with chromium() as made:
            yield made
    except NoBrowserError as missing:
        pytest.skip(str(missing))
