"""Weights: a model's parameters and bytes, counted from its config, in total and per rank."""

from kvatlas.models.weights.counted import ClassTotal, Weights
from kvatlas.models.weights.tensor import Tensor, TensorClass

__all__ = ["ClassTotal", "Tensor", "TensorClass", "Weights"]
