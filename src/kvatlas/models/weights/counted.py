"""`Weights`: a model's parameters and bytes, by class and per rank.

Parameters are counted exactly, from the config. Bytes follow from the checkpoint's format and
include scales. If a safetensors index or file is next to the config, its total is used, and the
classes are scaled to match it. `warnings` lists all assumptions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.byte_sizes import size
from kvatlas.geometry.integers import natural
from kvatlas.models.class_defaults import missing_defaults
from kvatlas.models.config import Config
from kvatlas.models.model import Model, read_model, text_of
from kvatlas.models.sources import CheckpointSize, Source, find_config
from kvatlas.models.weights.checkpoint_format import CheckpointFormat, Origin, checkpoint_format
from kvatlas.models.weights.decoders import Text, Traits, stacked
from kvatlas.models.weights.families import FAMILIES, UNVERIFIED
from kvatlas.models.weights.formats import Format
from kvatlas.models.weights.outer import after_layers, before_layers, tied, vocabulary
from kvatlas.models.weights.tensor import Tensor, TensorClass, linear, norm
from kvatlas.models.weights.towers import tower

VOCABULARY_MULTIPLE = 64
"""vLLM pads the vocabulary of each rank to a multiple of this number of rows."""

_TOLERANCE = 0.05
"""If the checkpoint's size differs by more than this fraction from the size that its config
implies, there is a warning."""

Stored = tuple[Tensor, Format]


@dataclass(frozen=True)
class Weights:
    """The weights of a model, layer by layer, and their bytes.

    >>> weights = Weights.load("Llama-3.1-8B")
    >>> weights.parameters, weights.bytes
    (8030261248, 16060522496)
    >>> weights.classes["mlp"].parameters
    5637144576
    >>> weights.source
    'config, bf16'
    """

    name: str
    first: tuple[Stored, ...]
    """Weights before the layers: the embedding and, in multimodal models, a tower."""
    layers: tuple[tuple[Stored, ...], ...]
    last: tuple[Stored, ...]
    """Weights after the layers: a norm, and lm_head if it is not tied to the embedding."""
    predictors: tuple[Stored, ...]
    """Multi-token-prediction (MTP) layers. They are in the checkpoint; serving them is opt-in."""
    tied: bool
    """Whether lm_head shares the embedding's weights."""
    label: str
    """A description of the weight format."""
    origin: Origin = "config"
    """Where the format was found; `estimate` if the format or a part of the count is uncertain."""
    total: CheckpointSize | None = None
    """Bytes of all tensors according to a safetensors index or file, if there is one."""
    warnings: tuple[str, ...] = ()
    """Assumptions, and parts of the model that are not counted."""

    @classmethod
    def load(cls, source: Any, *, dtype: str | None = None) -> Weights:
        """Count the weights of a model from its config.

        `source` is a path, a mapping, a transformers config, a catalogue name or a hub id. `dtype`
        is the format of the matrices, such as `fp8` or `nvfp4` (see `NAMED_FORMATS`); by default
        it is the format of the checkpoint.

        >>> Weights.load("Llama-3.1-8B", dtype="fp8").bytes
        9081202432
        """
        if isinstance(source, Model):
            raise AtlasError(
                Code.UNREADABLE,
                "A Model describes only caches, so its weights cannot be counted",
                got=f"model {source.name}",
                hint="Pass the model's config, path or name instead of the Model",
            )
        return _read(find_config(source), dtype)

    @cached_property
    def classes(self) -> dict[TensorClass, ClassTotal]:
        """Parameters and bytes of each class of tensors; MTP layers are a separate class."""
        totals: dict[TensorClass, ClassTotal] = {}
        for tensor, format_ in self._all():
            had = totals.get(tensor.kind, ClassTotal(0, 0))
            held = round(format_.bytes_of(tensor) * self._scale)
            totals[tensor.kind] = ClassTotal(had.parameters + tensor.elements, had.bytes + held)
        return totals

    @property
    def parameters(self) -> int:
        """The number of parameters, with vision or audio encoders but without MTP layers."""
        return sum(tensor.elements for tensor, _ in self._served())

    @property
    def text_parameters(self) -> int:
        """Number of parameters of the text model, without MTP layers."""
        return sum(tensor.elements for tensor, _ in self._served() if tensor.kind != "tower")

    @property
    def bytes(self) -> int:
        """Bytes of the checkpoint, including MTP layers if it has them."""
        return self.total.bytes if self.total else self._derived

    @property
    def estimate(self) -> bool:
        """Whether `bytes` is an estimate; `warnings` lists the reasons."""
        return self.origin == "estimate" and self.total is None

    @property
    def source(self) -> str:
        """Origin of the number in `bytes`: a checkpoint's file, the config, or an estimate."""
        if self.total is not None:
            return self.total.source
        if self.origin == "assumed":
            return f"assumed {self.label}"
        return f"{self.origin}, {self.label}"

    def per_rank(
        self,
        *,
        tp: int = 1,
        ep: int = 1,
        stage_layers: Sequence[int] | None = None,
        mtp: bool = False,
    ) -> int:
        """Return the bytes of weights on the rank that holds the most.

        With `ep` > 1, whole experts are distributed over `ep` ranks; otherwise each expert is
        divided over `tp` ranks. `ep` includes the ranks of all data-parallel replicas, because
        the replicas share experts. `stage_layers` is the number of layers in each pipeline
        stage. `mtp` adds the MTP layers to the last stage.

        >>> weights = Weights.load("Llama-3.1-8B")
        >>> [weights.per_rank(tp=tp) >> 20 for tp in (1, 2, 8)]
        [15316, 7658, 1915]
        """
        shares = [
            natural(n, "an entry of stage_layers") for n in stage_layers or [len(self.layers)]
        ]
        tp, ep = natural(tp, "tp"), natural(ep, "ep")
        if tp * ep == 0:
            raise AtlasError(
                Code.BAD_TOPOLOGY,
                "`tp` and `ep` must be at least 1",
                got=f"tp {tp}, ep {ep}",
                hint="Pass 1 for a kind of parallelism that is not used",
            )
        if sum(shares) != len(self.layers):
            raise AtlasError(
                Code.BAD_TOPOLOGY,
                f"`stage_layers` must add up to the model's {len(self.layers)} layers",
                got=f"{shares}, which add up to {sum(shares)}",
                hint="Pass the number of layers of each stage, or omit stage_layers",
            )
        held: dict[tuple[Stored, ...], float] = {}
        stages, start = [], 0
        for share in shares:
            total = 0.0
            for layer in self.layers[start : start + share]:
                if layer not in held:
                    held[layer] = _held(layer, tp, ep)
                total += held[layer]
            stages.append(total)
            start += share
        stages[0] += _held(self.first, tp, ep)
        stages[-1] += _held(self.last, tp, ep)
        if self.tied and len(stages) > 1:  # the last stage uses the embedding as its lm_head
            rows = [x for x in self.first if x[0].kind == "embedding" and x[0].parts > 1]
            stages[-1] += _held(rows, tp, ep)
        if mtp:
            stages[-1] += _held(self.predictors, tp, ep)
        return round(max(stages) * self._scale)

    def _served(self) -> Iterator[Stored]:
        yield from self.first
        for layer in self.layers:
            yield from layer
        yield from self.last

    def _all(self) -> Iterator[Stored]:
        yield from self._served()
        yield from self.predictors

    @cached_property
    def _derived(self) -> int:
        return sum(format_.bytes_of(tensor) for tensor, format_ in self._all())

    def _contradiction(self) -> list[str]:
        """Return a list with a warning if the checkpoint's files and the config differ in size."""
        if self.total is None or abs(self._scale - 1) <= _TOLERANCE:
            return []
        return [
            f"the {self.total.source} lists {size(self.total.bytes)} of tensors, and the config "
            f"implies {size(self._derived)}: using the {self.total.source}"
        ]

    @property
    def _scale(self) -> float:
        return self.bytes / self._derived


@dataclass(frozen=True)
class ClassTotal:
    """The number of parameters and of bytes in one class of tensors, such as `mlp`."""

    parameters: int
    bytes: int


def _held(stored: Sequence[Stored], tp: int, ep: int) -> float:
    """Return the bytes of `stored` on one rank, with the vocabulary padded as in vLLM."""
    total = 0.0
    for tensor, format_ in stored:
        if tensor.kind in ("embedding", "lm_head") and tensor.parts > 1:
            unit = VOCABULARY_MULTIPLE * tp
            rows = -(-tensor.rows // unit) * VOCABULARY_MULTIPLE
            total += format_.bytes_of(tensor._replace(rows=rows))
        else:
            total += format_.bytes_of(tensor) * tensor.share(tp, ep)
    return total


def _read(source: Source, dtype: str | None) -> Weights:
    model, warnings = read_model(source), list[str]()
    root = Config(source.values)
    text_config = text_of(root)
    if not source.confidence:  # entries of the catalogue have all keys that matter
        defaults = missing_defaults(text_config, text_config.text("model_type"))
        text_config = text_config.completed(defaults)
    model_type = _described_type(root, text_config, model.architecture)
    layers_of, traits = FAMILIES.get(model_type, (stacked, Traits()))
    warnings += _doubt(model_type, text_config)
    if traits.decodes and "ForConditionalGeneration" in model.architecture:
        warnings.append(f"only the decoder of {model_type} is counted")
    caches: list[list[Any]] = [[] for _ in range(model.depth)]
    for layer in model.layers:
        caches[layer.index].append(layer.spec)
    text = Text(text_config, traits, tuple(tuple(specs) for specs in caches))
    tied_head = tied(root, text_config, traits)
    embedding, head = vocabulary(text)
    first = [
        *embedding,
        *before_layers(text),
        *tower(root, text_config, model.architecture, warnings),
    ]
    doubtful = bool(warnings)
    formats = checkpoint_format(source, root, text_config, model.dtype, dtype, warnings)
    layers = [
        _stored(tensors, formats, f"layers.{index}")
        for index, tensors in enumerate(layers_of(text))
    ]
    stored_first = _stored(first, formats)
    stored_last = _stored([*after_layers(text), *([] if tied_head else head)], formats)
    if formats.without_effect((stored_first, *layers, stored_last)):
        doubtful = True
        warnings.append(f"no matrix of the model is quantised as {formats.label}: assuming 16 bits")
    made = Weights(
        name=model.name,
        first=stored_first,
        layers=tuple(layers),
        last=stored_last,
        predictors=_predictors(text, layers, formats),
        tied=tied_head,
        label=formats.label,
        origin="estimate" if doubtful else formats.origin,
        total=formats.total,
        warnings=tuple(warnings),
    )
    return replace(made, warnings=(*warnings, *made._contradiction()))


def _described_type(root: Config, text: Config, architecture: str) -> str:
    """Return the model type that selects how weights are counted.

    Candidates are the model types in the config, then the architecture's name. The first candidate
    in the table of families is returned.
    """
    class_name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", architecture.partition("For")[0]).lower()
    types = [text.text("model_type") or "", root.text("model_type") or "", class_name]
    return next((word for word in types if word in FAMILIES), types[0] or class_name)


def _doubt(model_type: str, config: Config) -> list[str]:
    """Return a list with a warning if parameter counts of this model type were never verified."""
    if model_type not in FAMILIES:
        return [f"unknown family {model_type or '(none)'}: counted like Llama"]
    if config.get("engram_layer_ids"):
        return [
            "this count was not checked against another implementation, and the tables of n-grams "
            "are not counted: vLLM keeps them in host memory"
        ]
    # Kimi-K3, and Qwen4 with embeddings of n-grams
    if model_type in UNVERIFIED or config.has("attn_res_block_size") or config.get("ple_layer_ids"):
        return ["this count was not checked against another implementation"]
    return []


def _stored(
    tensors: Sequence[Tensor], formats: CheckpointFormat, prefix: str = ""
) -> tuple[Stored, ...]:
    names = (f"{prefix}.{tensor.name}" if prefix else tensor.name for tensor in tensors)
    pairs = zip(tensors, names, strict=True)
    return tuple((tensor, formats.format_of(name, tensor)) for tensor, name in pairs)


def _predictors(
    text: Text, layers: Sequence[Sequence[Stored]], formats: CheckpointFormat
) -> tuple[Stored, ...]:
    """Return the weights of MTP layers: copies of the last layer, plus a projection and norms."""
    number, hidden = text.config.predictors(), text.hidden
    if not number or text.traits.mtp == "none":
        return ()
    each = [tensor for tensor, _ in layers[-1]]
    each += [*linear("mtp", "eh_proj", hidden, 2 * hidden), norm("norms", 3 * hidden)]
    if text.traits.mtp == "embeds":
        each += [tensor for part in vocabulary(text) for tensor in part]
    made: list[Stored] = []
    for index in range(number):
        named = _stored(each, formats, f"layers.{text.depth + index}")
        also = _stored(each, formats, f"mtp.layers.{index}")
        # Checkpoints use both names: a tensor is unquantised if either name is ignored.
        made += [a if a[1].bits >= b[1].bits else b for a, b in zip(named, also, strict=True)]
    return tuple((tensor._replace(kind="mtp"), format_) for tensor, format_ in made)
