"""`Tensor`: one weight, and how ranks divide it.

A weight is known by its shape, by the class it belongs to, and by the number of parts that
tensor parallelism can divide it into: heads of an attention projection, rows of an MLP, 1 for
what every rank repeats. That one number says how query heads are cut, how kv heads are cut
until one is left, and that norms, routers and latent down-projections are not cut at all.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

TensorClass = Literal[
    "embedding", "lm_head", "attention", "indexer", "recurrent", "mlp", "experts",
    "shared_experts", "router", "norm", "tower", "mtp",
]  # fmt: skip
"""What a weight is for. A tower sees or hears; mtp layers predict further tokens."""


class Tensor(NamedTuple):
    """A weight of one layer, or of the model outside its layers.

    >>> keys = Tensor("attention", "self_attn.k_proj", 1024, 4096, parts=8, linear=True)
    >>> keys.elements, keys.share(tp=4), keys.share(tp=16)
    (4194304, 0.25, 0.125)
    """

    kind: TensorClass
    name: str
    """Inside its layer, as checkpoints call it."""
    rows: int
    columns: int = 1
    copies: int = 1
    """Experts, each with a matrix of this shape."""
    parts: int = 1
    """What tensor parallelism divides; 1 is repeated on every rank."""
    linear: bool = False
    """Whether it is a matrix that quantisation may take."""

    @property
    def elements(self) -> int:
        """Parameters."""
        return self.copies * self.rows * self.columns

    def share(self, tp: int = 1, ep: int = 1) -> float:
        """The part of it that the rank with the most holds."""
        if self.kind == "experts" and ep > 1:
            return -(-self.copies // ep) / self.copies
        return -(-self.parts // tp) / self.parts


def linear(
    kind: TensorClass,
    name: str,
    rows: int,
    columns: int,
    *,
    parts: int = 1,
    copies: int = 1,
    bias: bool = False,
    whole_bias: bool = False,
) -> list[Tensor]:
    """A matrix and its bias; `whole_bias` is one that is added after the ranks' sum.

    >>> [t.elements for t in linear("mlp", "mlp.up_proj", 8, 4, bias=True)]
    [32, 8]
    """
    tensors = [Tensor(kind, name, rows, columns, copies, parts, linear=True)]
    if bias:
        parts = 1 if whole_bias else parts
        tensors.append(Tensor(kind, f"{name}.bias", rows, copies=copies, parts=parts))
    return tensors


def norm(name: str, width: int, *, bias: bool = False, parts: int = 1) -> Tensor:
    """A norm's weights, and its bias where it has one."""
    return Tensor("norm", name, width, 2 if bias else 1, parts=parts)


def count(tensors: list[Tensor]) -> int:
    """Parameters of all of them."""
    return sum(tensor.elements for tensor in tensors)
