"""The rules of lending staging buffers: complete together, and each one necessary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from tests.wire.lending_model import Model, Rules
from tests.wire.protocol_model import Search, search


def searched(rules: Rules, attempts: int = 2) -> Search:
    found = search(cast(Any, Model(rules, attempts)))
    print(found)
    return found


@pytest.mark.parametrize("segments", [False, True])
def test_no_reader_takes_bytes_of_another_for_its_own(segments: bool) -> None:
    found = searched(Rules(segments=segments))
    assert not found.violation
    assert found.states > 500


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("rule", ["gather_checks", "confirm", "drain"])
def test_each_rule_is_necessary(rule: str, segments: bool) -> None:
    found = searched(replace(Rules(segments=segments), **{rule: False}))
    if segments and rule != "confirm":
        assert not found.violation  # what is written late is in memory of the same reader
    else:
        assert found.violation == "wrong bytes"
        assert any(event.action == "reclaim" for event in found.trace)


def test_both_readers_can_finish_after_a_reclaim() -> None:
    """Neither is locked out: a state in which both are ready can be reached."""
    model = Model()
    seen, level = {model.first}, [model.first]
    best = 0
    while level:
        following = []
        for state in level:
            for event in model.possible(state):
                after, _ = model.step(state, event)
                if after not in seen:
                    seen.add(after)
                    following.append(after)
                    ready = [one for one in after.readers if one.status == "ready"]
                    if len(ready) == 2 and any(one.attempt == 2 for one in ready):
                        best = max(best, len(ready))
        level = following
    assert best == 2
