"""`Quantisation`: the weight format of each tensor of a checkpoint, as one value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvatlas.models.config import Config
from kvatlas.models.weights.formats import Format
from kvatlas.models.weights.name_patterns import NamePatterns
from kvatlas.models.weights.tensor import Tensor


class Quantisation(NamedTuple):
    """The quantisation scheme of a checkpoint: a format for each quantised tensor."""

    label: str
    default: Format | None
    """The format of matrices that match no other rule; None if those are not quantised."""
    chosen: tuple[tuple[NamePatterns, Format | None], ...] = ()
    """Formats of named tensors, before every other rule; None if they are not quantised."""
    ignored: NamePatterns | None = None
    experts: Format | None = None
    """The format of experts, if it differs from `default`."""
    vocabulary: bool = False
    """Whether the embedding and lm_head are quantised like other matrices."""

    def format_of(self, name: str, tensor: Tensor) -> Format | None:
        """Return the format of a tensor with the full name `name`; None if it is unquantised."""
        if not (tensor.linear or tensor.kind == "embedding"):
            return None
        if self.ignored and self.ignored.match(name):
            return None
        for patterns, format_ in self.chosen:
            if patterns.match(name):
                return format_
        if tensor.kind in (("router", "tower") if self.vocabulary else _KEPT):
            return None
        return (self.experts if tensor.kind == "experts" else None) or self.default


_KEPT = ("embedding", "lm_head", "router", "tower")


def ignored(section: Config) -> NamePatterns:
    """Return patterns that match the tensors that a checkpoint does not quantise.

    >>> section = Config({"modules_to_not_convert": ["mlp"], "ignore": ["lm_head"]})
    >>> [ignored(section).match(name) for name in ("layers.0.mlp.up_proj", "lm_head", "embed")]
    [True, True, False]
    """
    modules = _listed(section, _MODULES)
    return NamePatterns([*modules, *_listed(section, _NAMES)], inside=bool(modules))


_MODULES = (
    "modules_to_not_convert", "ignored_layers", "skip_modules", "llm_int8_skip_modules",
)  # fmt: skip
_NAMES = ("ignore", "exclude_modules", "exclude")


def _listed(section: Config, keys: Iterable[str]) -> list[object]:
    return [pattern for key in keys for pattern in section.listing(key) or ()]


def labels(formats: Iterable[Format | None]) -> str:
    """Return a description of several formats, each mentioned once."""
    return " and ".join(dict.fromkeys(format_.label for format_ in formats if format_))
