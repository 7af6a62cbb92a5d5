"""`make test-architectures`: the architectures of the installed transformers, built and run.

Each model is built on the meta device, so this needs no memory, and about ten minutes of one core.
"""

from __future__ import annotations

import os

import pytest

from kvatlas.models import Model
from kvatlas.models.cache_comparison import ENGINES_DIFFER, differences
from kvatlas.models.not_decoders import REFUSED
from tests.architectures.buildable import NOT_BUILT

ASKED = bool(os.environ.get("KVATLAS_ARCHITECTURES"))


def _names() -> list[str]:
    if not ASKED:
        return []
    from tests.architectures.build import model_types

    return model_types()


@pytest.mark.skipif(not ASKED, reason="`make test-architectures` runs this test")
@pytest.mark.parametrize("name", _names())
def test_a_model_that_is_run_caches_what_kvatlas_reads(name: str) -> None:
    from tests.architectures.build import build

    built = build(name)
    kind = str(built.config["model_type"])
    if kind in REFUSED:
        pytest.skip(f"refused: {REFUSED[kind]}")
    model = Model.load({**built.config, "architectures": [built.architecture]})
    found = differences(model.layers, built.layers, model_type=kind, longest=model.max_len)
    assert bool(found) == (kind in ENGINES_DIFFER), found[:2]


@pytest.mark.skipif(not ASKED, reason="`make test-architectures` runs this test")
def test_models_that_are_not_built_are_refused() -> None:
    assert set(NOT_BUILT) <= REFUSED.keys()
