from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvatlas.errors import AtlasError, Code
from kvatlas.wire import make_transport
from tests.wire.transports.ends import KINDS, Here, Kind, Peer
from tests.wire.transports.peer import SIZES, End

Far = Peer | Here


def skip_without(kind: Kind) -> None:
    """Skip, with the reason, where a transport's library is missing or broken."""
    try:
        make_transport(kind.name, **kind.options).close()
    except AtlasError as problem:
        if problem.code is not Code.MISSING_EXTRA:
            raise
        pytest.skip(str(problem))


def in_its_settings(kind: Kind) -> Iterator[Kind]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in kind.settings.items():
            patch.setenv(name, value)
        skip_without(kind)
        yield kind


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.label)
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    yield from in_its_settings(request.param)


@pytest.fixture(scope="module")
def near_options() -> dict[str, Any]:
    return {}


def other_end(
    kind: Kind, options: dict[str, Any], name: str, sizes: dict[int, int] | None = None
) -> Far:
    del name  # all transports have the same options at all ends
    return Peer(kind, options, sizes) if kind.remote else Here(kind, options)


@pytest.fixture(scope="module")
def far(kind: Kind, near_options: dict[str, Any]) -> Iterator[Far]:
    """A peer that lives as long as the tests that do it no harm."""
    made = other_end(kind, near_options, "shared")
    yield made
    made.end()


@pytest.fixture(scope="module")
def near(kind: Kind, near_options: dict[str, Any]) -> Iterator[End]:
    made = End(kind.name, near_options, SIZES)
    yield made
    made.drop()


@pytest.fixture
def fresh_far(
    kind: Kind, near_options: dict[str, Any], tmp_path: Path
) -> Iterator[Callable[..., Peer]]:
    """Peers that may be harmed."""
    made: list[Far] = []

    def start(sizes: dict[int, int] | None = None) -> Peer:
        one = other_end(kind, near_options, f"{tmp_path.name}-{len(made)}", sizes)
        made.append(one)
        assert isinstance(one, Peer)
        return one

    yield start
    for one in made:
        one.end()
