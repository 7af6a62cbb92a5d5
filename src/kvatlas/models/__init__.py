"""Models: read a model's config and list what each layer caches.

`Model.load` takes a config in any form, or a name from the built-in catalogue, and
lists the model's caches in the order in which an engine registers them. For each family of
models there is one function, called a reader, that lists the caches. Families differ in layer
patterns and sizes; the spec of each layer validates the sizes.

`Weights.load` takes the same sources and counts parameters and bytes. `memory_for_cache`
returns the GPU memory that remains for caches after the weights are loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvatlas import imported_on_first_use
from kvatlas.models.known_models import catalogue
from kvatlas.models.layer import Layer
from kvatlas.models.model import Model

if TYPE_CHECKING:
    from kvatlas.models.cache_identity import CacheIdentity, config_identity
    from kvatlas.models.checkpoint_identity import weights_identity
    from kvatlas.models.gpus import (
        GPUS,
        OVERHEAD,
        Gpu,
        Gpus,
        find_gpu,
        find_gpus,
        memory_for_cache,
    )
    from kvatlas.models.weights import Weights
else:
    __getattr__ = imported_on_first_use(
        __name__,
        {
            "cache_identity": ("CacheIdentity", "config_identity"),
            "checkpoint_identity": ("weights_identity",),
            "gpus": (
                "GPUS", "OVERHEAD", "Gpu", "Gpus", "find_gpu", "find_gpus", "memory_for_cache",
            ),
            "weights": ("Weights",),
        },
    )  # fmt: skip

__all__ = [
    "GPUS",
    "OVERHEAD",
    "CacheIdentity",
    "Gpu",
    "Gpus",
    "Layer",
    "Model",
    "Weights",
    "catalogue",
    "config_identity",
    "find_gpu",
    "find_gpus",
    "memory_for_cache",
    "weights_identity",
]
