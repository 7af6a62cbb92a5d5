"""Weights: a model's parameters and bytes, from its config, and what each rank holds."""

from kvatlas.models.weights.counted import ClassTotal, Weights
from kvatlas.models.weights.tensor import Tensor, TensorClass

__all__ = ["ClassTotal", "Tensor", "TensorClass", "Weights"]
