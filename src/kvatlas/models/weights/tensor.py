"""`Tensor`: one weight, and how tensor parallelism divides it.

A weight has a shape, a class, and the number of parts into which tensor parallelism can
divide it: the heads of an attention projection, the rows of an MLP, or 1 for a weight that is
replicated on every rank. Thus query heads are divided, KV heads are divided until each rank has
one head, and norms, routers and latent down-projections are replicated.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

TensorClass = Literal[
    "embedding", "lm_head", "attention", "indexer", "recurrent", "mlp", "experts",
    "shared_experts", "router", "norm", "tower", "mtp",
]  # fmt: skip
"""The class of a weight. `tower` is a vision or audio encoder; `mtp` is multi-token prediction."""


class Tensor(NamedTuple):
    """A weight of one layer, or of the model outside its layers.

    >>> keys = Tensor("attention", "self_attn.k_proj", 1024, 4096, parts=8, linear=True)
    >>> keys.elements, keys.share(tp=4), keys.share(tp=16)
    (4194304, 0.25, 0.125)
    """

    kind: TensorClass
    name: str
    """The name inside its layer, as checkpoints spell it."""
    rows: int
    columns: int = 1
    copies: int = 1
    """The number of weights with this shape, such as one per expert."""
    parts: int = 1
    """Number of parts that can be distributed over ranks; a weight with 1 part is replicated."""
    linear: bool = False
    """Whether the weight is a matrix that can be quantised."""

    @property
    def elements(self) -> int:
        """The number of parameters."""
        return self.copies * self.rows * self.columns

    def share(self, tp: int = 1, ep: int = 1) -> float:
        """Return the largest fraction of the weight that any rank holds."""
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
    """Return a list of a matrix and, if `bias` is true, its bias.

    If `whole_bias` is true, every rank holds the whole bias, which is added after the
    all-reduce.

    >>> [t.elements for t in linear("mlp", "mlp.up_proj", 8, 4, bias=True)]
    [32, 8]
    """
    tensors = [Tensor(kind, name, rows, columns, copies, parts, linear=True)]
    if bias:
        parts = 1 if whole_bias else parts
        tensors.append(Tensor(kind, f"{name}.bias", rows, copies=copies, parts=parts))
    return tensors


def norm(name: str, width: int, *, bias: bool = False, parts: int = 1) -> Tensor:
    """Return the weight of a norm; if `bias` is true, the tensor also includes the bias."""
    return Tensor("norm", name, width, 2 if bias else 1, parts=parts)


def count(tensors: list[Tensor]) -> int:
    """Return the total number of parameters of `tensors`."""
    return sum(tensor.elements for tensor in tensors)
