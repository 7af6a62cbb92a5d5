"""Check that transformers caches the same tensors that kvatlas has read from a config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvatlas.errors import AtlasError, Code, MissingExtraError
from kvatlas.models.cache_comparison import ENGINES_DIFFER, differences
from kvatlas.models.layer import Layer
from kvatlas.models.sources import Source

_HINT = "Report the config at the project's issue tracker, and do not trust the plan"


def verify(layers: Sequence[Layer], source: Source, longest: int | None) -> str | None:
    """Raise an error if transformers caches something other than `layers` for the same config.

    `longest` is the longest context in tokens. If vLLM and transformers are known to cache this
    model in different forms, nothing is compared, and a warning is returned.
    """
    try:
        from kvatlas.models import transformers_oracle as oracle
    except ImportError as error:
        raise MissingExtraError(error.name or "transformers", "transformers") from error
    config = _config(source)
    text = config.get_text_config(decoder=True)
    different = ENGINES_DIFFER.get(text.model_type)
    if different is not None:
        return f"not verified with transformers: {different}"
    try:
        built = oracle.build_config(text)
    except Exception as error:  # transformers' models fail in many ways
        raise _refused(
            source, f"the model cannot be run: {type(error).__name__}: {error}"
        ) from error
    found = differences(layers, built.layers, model_type=text.model_type, longest=longest)
    if found:
        raise AtlasError(
            Code.UNKNOWN_ARCHITECTURE,
            "kvatlas and transformers expect different caches for this model",
            got=f"differences in {len(found)} layers; {found[0]}",
            hint=_HINT,
        )
    return None


def _config(source: Source) -> Any:
    """Return the transformers config of a source."""
    import transformers

    model_type = source.values.get("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        raise _refused(source, f"transformers has no model type {model_type!r}")
    try:
        return transformers.CONFIG_MAPPING[model_type].from_dict(dict(source.values))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise _refused(source, f"transformers cannot read the config: {reason}") from error


def _refused(source: Source, reason: str) -> AtlasError:
    return AtlasError(
        Code.UNKNOWN_ARCHITECTURE,
        "The model cannot be verified with transformers",
        got=f"{source.name or 'the config'}: {reason}"[:400],
        hint="Pass the config.json of a model that transformers supports, or skip verification",
    )
