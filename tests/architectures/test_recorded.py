"""Each causal language model of transformers: read as transformers caches it, or refused."""

from __future__ import annotations

import pytest

from kvatlas import AtlasError, Code
from kvatlas.models import Model
from kvatlas.models.cache_comparison import ENGINES_DIFFER, differences
from kvatlas.models.not_decoders import REFUSED
from tests.architectures.buildable import NOT_BUILT
from tests.architectures.recording import recorded

REFUSED_AND_BUILT = sorted(REFUSED.keys() & recorded().keys())
COMPUTED = (
    "layer_types", "layers_block_type", "block_types", "indexer_types", "no_rope_layers",
    "per_layer_config", "num_layers_per_stack",
)  # fmt: skip
"""Keys whose defaults the config classes of transformers compute from other keys."""
READ = sorted(recorded().keys() - REFUSED.keys())


@pytest.mark.parametrize("model_type", READ)
def test_each_layer_caches_what_transformers_caches(model_type: str) -> None:
    entry = recorded()[model_type]
    model = Model.load(entry.config)
    kind = str(entry.config["model_type"])
    found = differences(model.layers, entry.layers, model_type=kind, longest=model.max_len)
    assert bool(found) == (kind in ENGINES_DIFFER), found[:2]


@pytest.mark.parametrize("model_type", READ)
def test_keys_that_transformers_computes_may_be_missing(model_type: str) -> None:
    """The recorded configs are the defaults, so that transformers computes the same keys again."""
    config = recorded()[model_type].config
    whole = [layer.spec for layer in Model.load(config).layers]
    present = [key for key in COMPUTED if config.get(key) is not None]
    for keys in [*([key] for key in present), present]:
        rest = {key: value for key, value in config.items() if key not in keys}
        try:
            model = Model.load(rest)
        except AtlasError as refusal:
            assert refusal.code is Code.MISSING_KEY, keys
            continue
        assert [layer.spec for layer in model.layers] == whole, keys


@pytest.mark.parametrize("model_type", READ)
def test_no_key_of_a_known_architecture_is_unread(model_type: str) -> None:
    """A warning here is noise for every user of the architecture, or a defect of its reader."""
    unread = [w for w in Model.load(recorded()[model_type].config).warnings if "not read" in w]
    assert unread == []


@pytest.mark.parametrize("model_type", REFUSED_AND_BUILT)
def test_an_architecture_that_cannot_be_planned_is_refused_with_its_reason(model_type: str) -> None:
    with pytest.raises(AtlasError, match="cannot plan a KV cache") as refusal:
        Model.load(recorded()[model_type].config)
    assert refusal.value.code is Code.UNKNOWN_ARCHITECTURE
    assert REFUSED[model_type] in str(refusal.value)


def test_at_most_ten_architectures_are_refused() -> None:
    assert len(REFUSED) <= 10
    assert set(NOT_BUILT) <= REFUSED.keys()
    assert len(recorded()) + len(NOT_BUILT) == 189
