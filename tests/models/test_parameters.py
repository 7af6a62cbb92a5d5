"""Parameters of every causal language model of transformers, as `tools/record_parameters.py` found.

Each architecture is built from its default config. Its parameters are counted to 0.5%, or the
count is labelled an estimate, or the config is refused.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from kvatlas import AtlasError
from kvatlas.models import Weights

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("parameters.json").read_text())
TOLERANCE = 0.005


def verdict(recorded: dict[str, Any]) -> str:
    """How our count compares with that of transformers: exact, close, estimate, refused, wrong."""
    config = {"architectures": [recorded["architecture"]], "dtype": "bfloat16"}
    try:
        weights = Weights.load(config | recorded["config"])
    except AtlasError:
        return "refused"
    if weights.parameters == recorded["parameters"] and not weights.estimate:
        return "exact"
    if weights.estimate:
        return "estimate"
    off = abs(weights.parameters - recorded["parameters"]) / recorded["parameters"]
    return "close" if off <= TOLERANCE else "wrong"


def verdicts() -> dict[str, str]:
    """The verdict on each recorded architecture."""
    return {name: verdict(one) for name, one in RECORDED["architectures"].items()}


def test_parameters_are_those_of_transformers_or_an_estimate() -> None:
    found = verdicts()
    assert [name for name, word in found.items() if word == "wrong"] == []
    numbers = Counter(found.values())
    assert numbers["exact"] + numbers["close"] >= 150, numbers
    assert len(found) >= 180


if __name__ == "__main__":
    listed = verdicts()
    for word, number in Counter(listed.values()).most_common():
        print(number, word, *(name for name in listed if listed[name] == word))
