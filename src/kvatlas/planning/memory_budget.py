"""Predict how vLLM divides the memory of a GPU, and with which flags to start it.

vLLM loads the weights, runs a batch of dummy requests to measure the activations, and gives caches
the rest of its share of the GPU. `gpu_budget` predicts each of these parts from the config and the
engine's settings. Formulas follow vLLM's source; their constants were fitted to measurements of
vLLM 0.11 and compared with startup logs: `python -m tests.planning.startup_logs` prints the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry.byte_sizes import size
from kvatlas.geometry.integers import positive
from kvatlas.models import Gpu, Weights
from kvatlas.planning.engine_rules import chip_of
from kvatlas.planning.given_sizes import Topology
from kvatlas.planning.topology import stage_layers

GIB, MIB = 2**30, 2**20
NEWEST_ENGINE = "0.32"
_ELEMENT = 2
"""Bytes of an activation: engines compute in 16 bits."""
_SORTING, _FUSED = 38.3, 14.0
"""Bytes per logit of a dummy batch: with a sort of the vocabulary, and with fused top-k and top-p.

The first is that of startup logs of vLLM 0.11 (five models within 1%). The second is the sum of the
tensors in the sampler of vLLM 0.32: logits in 16 and 32 bits, probabilities and noise. PyTorch
allocated 38.0 and 14.0 bytes for the same operations on an H200."""
_LAST_SORTING = (0, 14)
_ROWS = 3
"""Rows of the hidden size per token that live next to a layer's widest block: input, residual and
output."""
_LAST_MARLIN = (0, 10)
"""The last release whose kernels for mxfp4 experts pad both sizes, rather than one."""
_FIRST_GRAPHS = (0, 21)
"""The first release that takes the memory of CUDA graphs from the caches."""
_PER_GRAPH = 0.4 * MIB
"""Bytes of one CUDA graph per layer, in the logs of vLLM 0.19 to 0.27."""
_DEFAULT_EXPERTS = 8
"""Experts per token if the config does not specify them."""


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of vLLM that determine how much memory it needs besides weights and caches."""

    batched_tokens: int
    """`--max-num-batched-tokens`: tokens of the largest batch."""
    sequences: int
    """`--max-num-seqs`: requests of the largest batch."""
    eager: bool = False
    """`--enforce-eager`: no CUDA graphs."""
    loras: int = 0
    """`--max-loras`: LoRA adapters in GPU memory."""
    lora_rank: int = 16
    """`--max-lora-rank`."""
    largest_graph: int = 512
    """Tokens of the largest batch that has a CUDA graph."""
    release: str = NEWEST_ENGINE
    """The release of vLLM."""

    def __post_init__(self) -> None:
        positive(self.batched_tokens, "batched_tokens")
        positive(self.sequences, "sequences")

    @classmethod
    def default(cls, gpu: Gpu, **changes: Any) -> EngineLoad:
        """Return the defaults of `vllm serve` on a GPU, with some settings replaced.

        >>> from kvatlas.models import find_gpu
        >>> EngineLoad.default(find_gpu("H100")).batched_tokens
        8192
        >>> EngineLoad.default(find_gpu("A100")).sequences
        256
        """
        if gpu.memory >= 160 * GIB:
            tokens, sequences = 16384, 1024
        elif gpu.memory >= 70 * GIB and not gpu.name.startswith("A100"):
            tokens, sequences = 8192, 1024
        else:
            tokens, sequences = 2048, 256
        graph = 1024 if (chip_of(gpu.name) or "").startswith("sm10") else 512
        given = {name: value for name, value in changes.items() if value is not None}
        defaults = {"batched_tokens": tokens, "sequences": sequences, "largest_graph": graph}
        return cls(**defaults | given)

    @property
    def version(self) -> tuple[int, ...]:
        """The release as numbers."""
        parts = self.release.split(".")
        if not all(part.isdecimal() for part in parts):
            hint = "Pass a release such as 0.32"
            raise AtlasError(
                Code.BAD_QUANTITY, "`release` must be a version number", got=self.release, hint=hint
            )
        return tuple(int(part) for part in parts[:2])

    @property
    def graphs(self) -> int:
        """The number of CUDA graphs that vLLM captures: for mixed batches, and for decoding."""
        if self.eager:
            return 0
        most = min(2 * self.sequences, self.largest_graph)
        listed = (1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16))
        sizes: list[int] = [n for n in listed if n <= most]
        return len(sizes) + len([n for n in sizes if n <= self.sequences])


class BudgetLine(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a GPU's memory: its bytes, how they were determined, and their error."""

    name: str
    nbytes: int
    source: str
    error: int
    """Bytes by which the true value may differ."""
    inside: bool = True
    """Whether vLLM takes the part from its share of the GPU, rather than from the rest."""


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of the GPU that holds the most weights, divided into lines."""

    model: str
    gpu: str
    memory: int
    """Bytes that a process can use."""
    utilization: float
    topology: Topology
    load: EngineLoad
    lines: tuple[BudgetLine, ...]

    @property
    def usable(self) -> int:
        """Bytes of the GPU's memory that vLLM may use: the fraction `utilization` of all bytes."""
        return int(self.memory * self.utilization)

    @property
    def overhead(self) -> int:
        """Bytes inside vLLM's share that are neither weights nor cache."""
        return sum(line.nbytes for line in self.lines if line.inside and line.name != "weights")

    @property
    def kv(self) -> int:
        """Bytes that are left for caches; negative if the model does not fit."""
        return self.usable - sum(line.nbytes for line in self.lines if line.inside)

    @property
    def error(self) -> int:
        """Bytes by which `kv` may be wrong: the errors of all lines that determine it."""
        return sum(line.error for line in self.lines if line.inside)

    @property
    def margin(self) -> int:
        """Bytes that are left free outside vLLM's share."""
        return self.memory - self.usable - sum(x.nbytes for x in self.lines if not x.inside)

    def flags(self, block_size: int) -> tuple[str, ...]:
        """Return the flags of `vllm serve` for which the budget holds."""
        sizes, load = self.topology, self.load
        ranks = {
            "tensor-parallel-size": sizes.tp,
            "pipeline-parallel-size": sizes.pp,
            "data-parallel-size": sizes.dp,
            "decode-context-parallel-size": sizes.dcp,
        }
        return (
            *(f"--{name} {number}" for name, number in ranks.items() if number > 1),
            *(["--enable-expert-parallel"] if sizes.ep > 1 else []),
            f"--kv-cache-memory {max(0, self.kv)}",
            f"--max-num-seqs {load.sequences}",
            f"--max-num-batched-tokens {load.batched_tokens}",
            f"--block-size {block_size}",
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the budget as a JSON object."""
        return {
            **msgspec.to_builtins(self),
            "kv": self.kv,
            "error": self.error,
            "overhead": self.overhead,
            "margin": self.margin,
        }


def gpu_budget(
    weights: Weights,
    gpu: Gpu,
    topology: Topology | None = None,
    *,
    load: EngineLoad | None = None,
    utilization: float = 0.9,
    experts_per_token: int | None = None,
) -> Budget:
    """Return the memory budget of the GPU that holds the most weights.

    >>> from kvatlas.models import find_gpu
    >>> made = gpu_budget(Weights.load("Llama-3.1-8B"), find_gpu("H100"))
    >>> [line.name for line in made.lines]
    ['weights', 'activations', 'CUDA graphs', 'NCCL and kernels', 'CUDA context']
    >>> made.kv // GIB
    53
    """
    sizes = Topology() if topology is None else topology
    load = EngineLoad.default(gpu) if load is None else load
    parts = _Parts(weights, sizes, load, experts_per_token)
    return Budget(
        model=weights.name,
        gpu=gpu.name,
        memory=gpu.memory,
        utilization=utilization,
        topology=sizes,
        load=load,
        lines=tuple(line for line in parts.lines() if line.nbytes),
    )


class _Parts:
    """The lines of a budget, each with its formula."""

    def __init__(
        self, weights: Weights, sizes: Topology, load: EngineLoad, experts: int | None
    ) -> None:
        self.weights, self.sizes, self.load = weights, sizes, load
        self.experts = experts or _DEFAULT_EXPERTS
        embeddings = [t for t, _ in weights.first if t.kind == "embedding" and t.parts > 1]
        self.hidden = max((t.columns for t in embeddings), default=0)
        self.vocabulary = max((t.rows for t in embeddings), default=0)
        self.depth = len(weights.layers)

    def lines(self) -> Iterator[BudgetLine]:
        """Yield every line of the budget; lines of unused features have 0 bytes."""
        yield self._weights()
        yield self._activations()
        yield self._graphs()
        yield self._loras()
        yield self._encoder()
        yield self._exchanges()
        ranks = self.sizes.tp * self.sizes.pp * max(1, self.sizes.ep // self.sizes.tp)
        nccl = int((0.13 if ranks == 1 else 0.55) * GIB)
        origin = "vLLM 0.11: 0.13 GiB on one GPU, 0.13 to 0.6 GiB on several"
        yield BudgetLine(name="NCCL and kernels", nbytes=nccl, source=origin, error=nccl // 2)
        context = int(0.5 * GIB)
        origin = "0.51 GiB measured on an H200, 0.4 GiB in startup logs"
        yield BudgetLine(
            name="CUDA context", nbytes=context, source=origin, error=context // 5, inside=False
        )

    def _weights(self) -> BudgetLine:
        stages = stage_layers(self.depth, self.sizes.pp)
        held = self.weights.per_rank(tp=self.sizes.tp, ep=self.sizes.ep, stage_layers=stages)
        error = held // (10 if self.weights.estimate else 100)
        source = self.weights.source
        padding = self._padding()
        if padding:
            source += f"; {size(padding)} of it because kernels pad mxfp4 experts"
        return BudgetLine(
            name="weights", nbytes=held + padding, source=source, error=error + padding // 2
        )

    def _padding(self) -> int:
        """Return the bytes by which vLLM pads the experts of an mxfp4 checkpoint."""
        if "mxfp4" not in self.weights.label:
            return 0
        total = 0.0
        for layer in self.weights.layers:
            for tensor, form in layer:
                if tensor.kind == "experts" and tensor.linear:
                    held = form.bytes_of(tensor) * tensor.share(self.sizes.tp, self.sizes.ep)
                    total += held * (self._padded(tensor.parts) - 1)
        return round(total / self.sizes.pp)

    def _padded(self, inner: int) -> float:
        """Return the ratio of the padded size to the size of an expert with `inner` rows."""
        if self.load.version <= _LAST_MARLIN:
            return _rounded(inner, 128) / inner * _rounded(self.hidden, 256) / self.hidden
        return _rounded(inner, 256) / inner

    def _activations(self) -> BudgetLine:
        load, row = self.load, self.hidden * _ELEMENT
        sorting = load.version <= _LAST_SORTING
        logits = load.sequences * self.vocabulary * (_SORTING if sorting else _FUSED)
        sampling = load.batched_tokens * row + min(load.sequences, load.batched_tokens) * row
        layers = load.batched_tokens * (_ROWS * row + self._widest() * _ELEMENT)
        last = round(sampling + logits)
        nbytes = max(last, layers)
        what = "the sampler's logits" if nbytes == last else "the widest layer"
        share = 0.1 if sorting and nbytes == last else 0.25
        return BudgetLine(
            name="activations",
            nbytes=nbytes,
            source=f"{what}: {load.batched_tokens:,} tokens, {load.sequences:,} requests, "
            f"hidden size {self.hidden:,}, vocabulary {self.vocabulary:,}",
            error=round(nbytes * share),
        )

    def _widest(self) -> int:
        """Return the most elements per token that a layer of one rank holds at once."""
        return max((self._width(layer) for layer in set(self.weights.layers)), default=0)

    def _width(self, layer: Any) -> int:
        """Return the elements per token of a layer's largest block, such as its MLP."""
        widths = dict[str, float]()
        for tensor, _ in layer:
            if not tensor.linear:
                continue
            share = 1 / self.sizes.tp if tensor.parts > 1 else 1.0
            if tensor.kind == "experts":  # distributed experts are whole
                share = self.experts * (share if self.sizes.ep == 1 else 1 / self.sizes.tp)
            into = tensor.columns != self.hidden  # a projection back to the hidden size
            elements = tensor.columns * share if into else tensor.rows * share
            if into and tensor.kind == "experts":
                elements += self.experts * self.hidden
            widths[tensor.kind] = widths.get(tensor.kind, 0.0) + elements
        return round(max(widths.values(), default=0))

    def _graphs(self) -> BudgetLine:
        inside = self.load.version >= _FIRST_GRAPHS
        nbytes = round(self.load.graphs * self.depth / self.sizes.pp * _PER_GRAPH)
        return BudgetLine(
            name="CUDA graphs",
            nbytes=nbytes,
            source=f"{self.load.graphs} graphs, 0.4 MiB per layer",
            error=nbytes // 2,
            inside=inside,
        )

    def _loras(self) -> BudgetLine:
        load, elements = self.load, 0.0
        for layer in self.weights.layers:
            for tensor, _ in layer:
                if tensor.linear and tensor.kind in ("attention", "mlp", "shared_experts"):
                    parts = self.sizes.tp if tensor.parts > 1 else 1
                    elements += tensor.columns + tensor.rows / parts
        nbytes = round(load.loras * load.lora_rank * elements * _ELEMENT / self.sizes.pp)
        return BudgetLine(
            name="LoRA",
            nbytes=nbytes,
            source=f"{load.loras} adapters of rank {load.lora_rank}, all linear layers",
            error=nbytes // 4,
        )

    def _encoder(self) -> BudgetLine:
        tower = any(tensor.kind == "tower" for tensor, _ in self.weights.first)
        nbytes = self.load.batched_tokens * self.hidden * _ELEMENT if tower else 0
        return BudgetLine(
            name="encoder cache",
            nbytes=nbytes,
            source=f"{self.load.batched_tokens:,} tokens of an encoder",
            error=nbytes + (GIB if tower else 0),
        )

    def _exchanges(self) -> BudgetLine:
        """Return the line of buffers in which ranks exchange tokens of distributed experts."""
        replicas = self.sizes.dp if self.sizes.ep > 1 else 1
        row = self.hidden * _ELEMENT
        nbytes = 2 * self.load.batched_tokens * row * replicas if replicas > 1 else 0
        return BudgetLine(
            name="expert-parallel buffers",
            nbytes=nbytes,
            source=f"tokens of {replicas} replicas, gathered and reduced",
            error=nbytes // 2,
        )


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
