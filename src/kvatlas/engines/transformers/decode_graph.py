"""Decode steps of a model as one CUDA graph.

Block tables and lengths are kept in tensors with fixed addresses, so every step of one token per
sequence launches the same kernels on the same memory. The step is captured once and replayed. For
each replay the host only allocates blocks for new tokens, updates a few numbers and launches the
graph. It does not run the model's Python code for every layer.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, Self

import torch
from torch import Tensor

from kvatlas.engines.transformers.cache import AtlasCache
from kvatlas.engines.transformers.paged_attention import NAME
from kvatlas.engines.transformers.sequence_batch import (
    FixedStep,
    SequenceBatch,
    StepTensors,
    masked_otherwise,
)
from kvatlas.errors import AtlasError, Code

_ASKED_BESIDES = ("inputs_embeds", "labels", "output_attentions", "output_hidden_states")
"""Options of a forward call that a captured step does not support."""


class DecodeGraph:
    """A context manager that runs a model's decode steps as a captured CUDA graph.

    Inside the `with` block, call `generate()` or the model as usual. Steps of one token for every
    sequence of the cache are replayed from the graph; all other calls run normally. The first
    step of a batch warms up, and the second is captured. When the block tables have outgrown
    their tensors, the next two steps warm up and capture again. The output of a replayed step is
    overwritten by the next step.

    A mask that hides more than the left padding raises an error. The check runs in parallel with
    the step and completes before the output is returned. For models with recurrent states, the
    check completes before the step starts, because a step cannot be undone. Without a GPU, steps
    use the same fixed tensors, but no graph is captured.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32,
    ...     num_hidden_layers=1, num_attention_heads=2, attn_implementation="kvatlas")
    >>> model = LlamaForCausalLM(config).eval()
    >>> cache = AtlasCache.from_config(config, batch=1, max_len=64)
    >>> with DecodeGraph(model, cache) as graph:
    ...     ids = model.generate(torch.tensor([[5, 6, 7]]), past_key_values=cache,
    ...         max_new_tokens=9, do_sample=False, eos_token_id=None)
    >>> graph.steps, cache.lengths
    (8, [11])
    """

    def __init__(self, model: Any, cache: AtlasCache) -> None:
        if model.config._attn_implementation != NAME:
            raise AtlasError(
                Code.ENGINE_REFUSES,
                "A decode graph requires attention that reads the pages directly",
                got=f"attn_implementation={model.config._attn_implementation!r}",
                hint=f'Load the model with attn_implementation="{NAME}"',
            )
        self.model = model
        self.cache = cache
        self.steps = 0
        """Number of decode steps run on the fixed tensors, with or without a graph."""
        self._forward = model.forward
        self._own = "forward" in vars(model)
        self._step: _CapturedStep | None = None
        self._looked_at = -1

    @property
    def captured(self) -> bool:
        """Whether a graph has been captured, so that steps are replayed."""
        return self._step is not None and self._step.captured

    def __enter__(self) -> Self:
        forward = self._forward

        @wraps(forward)
        def step_or_forward(input_ids: Tensor | None = None, *others: Any, **options: Any) -> Any:
            if input_ids is None or others or not self._is_step(input_ids, options):
                return forward(input_ids, *others, **options)
            return self._run(input_ids, options)

        self.model.forward = step_or_forward
        return self

    def __exit__(self, *_: object) -> None:
        if self._own:
            self.model.forward = self._forward
        else:
            del self.model.forward
        self._step = None

    def _is_step(self, ids: Tensor, options: dict[str, Any]) -> bool:
        """Return whether a forward call adds one token to every sequence of the cache.

        Return False if the call has options that a captured step does not support.
        """
        positions = options.get("position_ids")
        return (
            options.get("past_key_values") is self.cache
            and self.model.config._attn_implementation == NAME
            and self.cache.seen > max(self.cache.batch.padding, default=0)
            and tuple(ids.shape) == (self.cache.batch.size, 1)
            and (positions is None or positions.dim() == ids.dim())
            and options.get("return_dict", True) is not False
            and not any(options.get(name) is not None for name in _ASKED_BESIDES[:2])
            and not any(options.get(name) for name in _ASKED_BESIDES[2:])
        )

    def _run(self, ids: Tensor, options: dict[str, Any]) -> Any:
        cache, start = self.cache, self.cache.seen
        batch = cache.batch
        batch.settle()
        mask, hides = options.get("attention_mask"), None
        if self._looked_at != batch.number:
            batch.expect_paged_attention(mask, batch.size, start, 1)
            self._looked_at = batch.number
        elif mask is not None:
            hides = _LookAtMask(mask[..., : start + 1], batch)
            if any(table.recurrent for table in batch.tables):
                hides.check()
        if self._step is None or self._step.sequences != batch.size:
            self._step = _CapturedStep(self._forward, cache)
        answer = self._step.run(ids, options.get("position_ids"), start)
        if hides is not None:
            hides.check()
        cache.count_tokens(1)
        self.steps += 1
        return answer


class _LookAtMask:
    """An asynchronous check that a mask hides the left padding and nothing else.

    The check is launched before a step, and its result is copied to the host while the step runs.
    """

    def __init__(self, mask: Tensor, batch: SequenceBatch) -> None:
        answer = batch.masks_left_padding_alone(mask)
        self._answer, self._known = answer, None
        if answer.is_cuda:
            self._answer = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._answer.copy_(answer, non_blocking=True)
            self._known = torch.Event("cuda")
            self._known.record()

    def check(self) -> None:
        """Wait for the result and raise an error if the mask hides more than the padding."""
        if self._known is not None:
            self._known.synchronize()
        if not self._answer:
            raise masked_otherwise()


class _CapturedStep:
    """One decode step on fixed tensors. After the step is captured, also its CUDA graph."""

    def __init__(self, forward: Any, cache: AtlasCache) -> None:
        batch, device = cache.batch, cache.batch.tables[0].device
        self._forward, self._cache, self.sequences = forward, cache, batch.size
        self._attention = [table for table in batch.tables if not table.recurrent]
        self._numbers = torch.zeros(
            (2 + len(self._attention), batch.size), dtype=torch.long, device=device
        )
        positions, lengths, *slots = self._numbers
        self._positions = positions.unsqueeze(1)
        self._ids = torch.zeros_like(self._positions)
        tensors = StepTensors(lengths, torch.ones_like(lengths), None)
        self._fixed = FixedStep(tensors, dict(zip(self._attention, slots, strict=True)))
        self._tables: list[Tensor] = []
        """The block tables that the graph reads. The list keeps their memory from being reused."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._answer: Any = None
        self._warm = False

    @property
    def captured(self) -> bool:
        """Whether the graph has been captured."""
        return self._graph is not None

    def run(self, ids: Tensor, positions: Tensor | None, start: int) -> Any:
        """Run a decode step for the tokens `ids`, at index `start` of each sequence.

        Blocks for these tokens are allocated first.
        """
        padding = self._cache.batch.padding
        lengths = [start + 1 - skipped for skipped in padding]
        slots = [table.reserve_next(start, padding) for table in self._attention]
        places = [start] * len(padding)  # what models use if no position_ids are passed
        self._numbers.copy_(torch.tensor([places, lengths, *slots]))
        self._ids.copy_(ids)
        if positions is not None:
            self._positions.copy_(positions)
        tables = [table.ids for table in self._cache.batch.tables]
        if list(map(id, tables)) != list(map(id, self._tables)):  # the tables were reallocated
            self._tables, self._graph, self._warm = tables, None, False
        if self._graph is None and self._warm and ids.is_cuda:
            self._capture()
        if self._graph is None:
            self._answer, self._warm = self._model(), True
        else:
            self._graph.replay()
        return self._answer

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._answer = self._model()
        except RuntimeError as failed:
            raise AtlasError(
                Code.ENGINE_REFUSES,
                "A decode step of this model cannot be captured in a CUDA graph",
                got=str(failed).splitlines()[0],
                hint="For an MoE model, call model.set_experts_implementation('batched_mm') first. "
                "For other models, run generate() without a DecodeGraph",
            ) from failed
        self._graph = graph

    def _model(self) -> Any:
        """Run the model on the fixed tensors, then write recurrent states back to the pages."""
        batch = self._cache.batch
        batch.fixed = self._fixed
        try:
            with torch.no_grad():
                answer = self._forward(
                    input_ids=self._ids,
                    position_ids=self._positions,
                    past_key_values=self._cache,
                    use_cache=True,
                )
            batch.settle()
        finally:
            batch.fixed = None
        return answer
