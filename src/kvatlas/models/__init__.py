"""Models: from a config to what each layer caches.

`Model.load` takes a config in any form, or a name from the built-in catalogue, and
lists a model's caches in the order in which an engine registers them. A reader
reads a family, not a model; families differ in patterns and in sizes, and every
size is checked by the spec that it ends in.

`Weights.load` takes the same, and counts parameters and their bytes; `memory_for_cache` says
what they leave of a GPU.
"""

from kvatlas.models.cache_identity import CacheIdentity, config_identity
from kvatlas.models.checkpoint_identity import weights_identity
from kvatlas.models.gpus import GPUS, OVERHEAD, Gpu, find_gpu, find_gpus, memory_for_cache
from kvatlas.models.known_models import catalogue
from kvatlas.models.layer import Layer
from kvatlas.models.model import Model
from kvatlas.models.weights import Weights

__all__ = [
    "GPUS",
    "OVERHEAD",
    "CacheIdentity",
    "Gpu",
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
