"""The weight format of a checkpoint, and the origin of this information.

The first of these that exists determines the format: the caller's `dtype`, the config's
quantisation section (or ModelOpt's hf_quant_config.json), a format in the checkpoint's name, and
the dtype in the config. The total number of bytes in a safetensors index or file is used unless
the caller passed a dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from kvatlas.geometry import DType
from kvatlas.models.config import Config
from kvatlas.models.sources import CheckpointSize, Source, checkpoint_size
from kvatlas.models.weights.formats import (
    FP8,
    GGUF_BLOCKS,
    INT8,
    UNQUANTISED,
    Format,
    format_in_name,
    named_format,
    plain,
)
from kvatlas.models.weights.quantisation import quantisation
from kvatlas.models.weights.scheme import Quantisation
from kvatlas.models.weights.tensor import Tensor

Origin = Literal["config", "weights_dtype", "assumed", "estimate"]
"""The origin of a format: the config, or the caller (`weights_dtype`).

`assumed` means that the config has no dtype. `estimate` means that the format was derived from
the checkpoint's name, or that its quantisation is unknown.
"""


_OF_DTYPES = {"e4m3": FP8, "e5m2": FP8, "int8": INT8, "uint8": INT8}


class CheckpointFormat(NamedTuple):
    """The formats of a checkpoint's tensors."""

    element: Format
    """The format of tensors that are not quantised."""
    scheme: Quantisation | None
    origin: Origin
    total: CheckpointSize | None = None
    """The bytes of all tensors on disk, if they are known."""

    @property
    def label(self) -> str:
        """A description of the format."""
        return self.scheme.label if self.scheme else self.element.label

    def format_of(self, name: str, tensor: Tensor) -> Format:
        """Return the format of a tensor with the full name `name`."""
        return (self.scheme and self.scheme.format_of(name, tensor)) or self.element

    def without_effect(self, parts: Iterable[Sequence[tuple[Tensor, Format]]]) -> bool:
        """Return whether the checkpoint has a scheme that quantises no tensor of `parts`."""
        if self.scheme is None:
            return False
        return all(format_ is self.element for part in parts for _, format_ in part)


def checkpoint_format(
    source: Source, root: Config, text: Config, served: str, given: str | None, warnings: list[str]
) -> CheckpointFormat:
    """Return the format of the checkpoint that `source` belongs to.

    `served` is the dtype of unquantised tensors in memory, and `given` is the format that the
    caller selected. `warnings` receives a message for each assumption.
    """
    element = plain(served)
    if given is not None:
        return _selected(named_format(given), element)
    before = len(warnings)
    scheme = quantisation(root, text, warnings)
    unknown, total = len(warnings) > before, checkpoint_size(source)
    dtype = root.get("dtype", "torch_dtype") or text.get("dtype", "torch_dtype")
    if scheme is None and total and dtype and DType.of(dtype).bits > element.bits:
        warnings.append(f"the checkpoint is stored in {DType.of(dtype).name}: counted as {served}")
        total = None
    name = source.name or root.text("_name_or_path") or ""
    stored = DType.of(dtype).bits if dtype and dtype != "auto" else 16
    if scheme is None and total is None and stored < 16:
        format_ = _OF_DTYPES.get(DType.of(dtype).name)
        warnings.append(
            f"the config has the dtype {dtype}, and does not describe a quantisation: assuming "
            f"{format_.label if format_ else '16 bits'} for all matrices of the layers"
        )
        found = (
            _selected(format_, element) if format_ else CheckpointFormat(element, None, "config")
        )
        return found._replace(origin="estimate")
    named = format_in_name(name) if scheme is None and total is None else ""
    if named:
        found = _selected(named_format(named), element)
        warnings.append(
            f"the name of the checkpoint contains {named.upper()}, but there is no description of "
            f"its quantisation: assuming {found.label} for all matrices of its layers; add its "
            "hf_quant_config.json or its safetensors index, or pass weights_dtype"
        )
        return found._replace(origin="estimate")
    stated = scheme or (dtype and dtype != "auto")
    origin: Origin = "estimate" if unknown else "config" if stated else "assumed"
    return CheckpointFormat(element, scheme, origin, total)


def _selected(format_: Format, element: Format) -> CheckpointFormat:
    """Return the formats of a checkpoint: `format_` for matrices, `element` for other tensors."""
    if format_.label in UNQUANTISED:
        return CheckpointFormat(format_, None, "weights_dtype")
    whole = format_ in GGUF_BLOCKS.values()  # GGUF files also quantise the embedding and lm_head
    scheme = Quantisation(format_.label, format_, vocabulary=whole)
    return CheckpointFormat(element, scheme, "weights_dtype")
