"""120 pairings of a prefill and a decode instance, each at a small size, every byte compared.

With `KVATLAS_FACTS` set to a folder that has `facts/pairings.json`, their names and what vLLM
made of them are compared with it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from tests.routing.pairings import PAIRINGS, Pairing, move_pairing, vllm_verdict
from tests.routing.pairings_page import page

FACTS = Path(os.environ.get("KVATLAS_FACTS", "")) / "facts" / "pairings.json"
PAGE = Path(__file__).parents[2] / "docs/reference/data/vllm_pairings.md"


@pytest.mark.slow
@pytest.mark.parametrize("pairing", PAIRINGS, ids=lambda pairing: pairing.name)
def test_pairing(pairing: Pairing) -> None:
    move_pairing(pairing)


def test_there_are_120_and_vllm_moves_69() -> None:
    verdicts = Counter(vllm_verdict(pairing.name) for pairing in PAIRINGS)
    assert verdicts == {"right": 69, "refused": 34, "corrupt": 17}


def test_the_page_says_what_these_tests_show() -> None:
    right = dict.fromkeys((pairing.name for pairing in PAIRINGS), "right")
    assert page(right) == PAGE.read_text(), "make it again: make docs-pairings"


@pytest.mark.skipif("KVATLAS_FACTS" not in os.environ, reason="KVATLAS_FACTS is not set")
def test_they_are_those_that_were_measured() -> None:
    measured = json.loads(FACTS.read_text())
    found = [(pairing.name, vllm_verdict(pairing.name)) for pairing in PAIRINGS]
    assert sorted(found) == sorted((record["case"], record["vllm"]) for record in measured)
