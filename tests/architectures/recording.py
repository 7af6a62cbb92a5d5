"""The recorded answers of transformers: configs, and what each layer caches."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from kvatlas.models.cache_comparison import CachedLayer


class Recorded(NamedTuple):
    """What transformers cached for one architecture."""

    architecture: str
    config: dict[str, Any]
    parameters: int
    layers: tuple[CachedLayer, ...]


@cache
def recorded() -> dict[str, Recorded]:
    """Return the recording by model type."""
    text = Path(__file__).with_name("recorded.json").read_text()
    return {name: _entry(values) for name, values in json.loads(text)["architectures"].items()}


def _entry(values: dict[str, Any]) -> Recorded:
    config = {**_expanded(values["config"]), "architectures": [values["architecture"]]}
    layers = [
        CachedLayer({name: tuple(shape) for name, shape in tensors.items()}, window)
        for count, tensors, window in values["layers"]
        for _ in range(count)
    ]
    return Recorded(values["architecture"], config, values["parameters"], tuple(layers))


def _expanded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.keys() == {"runs"}:
        return [one for one, count in value["runs"] for _ in range(count)]
    return {key: _expanded(one) for key, one in value.items()}
