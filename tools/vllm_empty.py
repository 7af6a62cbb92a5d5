"""Objects of vLLM's classes on which no constructor has run."""

from __future__ import annotations

from typing import Any

import torch


class UnsupportedError(ValueError):
    """The model's own backend does not support the chip."""


def empty(kind: Any) -> Any:
    """Return an object of a class of layers; only the constructor of `torch.nn.Module` has run."""
    made = object.__new__(kind)
    torch.nn.Module.__init__(made)
    return made


def with_attributes(made: Any, **about: Any) -> Any:
    """Set attributes of a layer, and return it."""
    for name, value in about.items():
        object.__setattr__(made, name, value)
    return made
