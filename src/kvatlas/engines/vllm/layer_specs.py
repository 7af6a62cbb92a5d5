"""Convert vLLM's cache specs of one rank to kvatlas specs of the whole model's layers.

The spec of a dense attention layer follows from vLLM's spec and the number of ranks. vLLM's specs
lack some details, such as the sections of a convolution and the rotary part of a latent. These
details come from the model's config and are checked against the sizes in vLLM's spec; a mismatch
raises an error.

vLLM's classes are matched by name, so that this module does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import DType, Page
from kvatlas.models import Layer, Model
from kvatlas.specs import (
    ATTENTION_CACHES,
    AnySpec,
    ChunkedAttention,
    FullAttention,
    Packing,
    Recurrent,
    Ring,
    SinkAttention,
    SlidingAttention,
    Visibility,
)

_PACKINGS: dict[str, Packing] = {"CPU_ATTN": "transposed", "ROCM_ATTN": "tiled_planes"}
"""Backends that do not store `k | v` in each cell, with their packing."""

_KEEPS_ALL = ("FullAttentionSpec",)
READ_CLASSES = (
    "FullAttentionSpec",
    "SlidingWindowSpec",
    "ChunkedLocalAttentionSpec",
    "SinkFullAttentionSpec",
    "MLAAttentionSpec",
    "SlidingWindowMLASpec",
    "CircularBufferSpec",
    "MambaSpec",
)
"""vLLM's classes of specs that are read. Others are refused, also if they derive from these."""
_CPU_DTYPES = ("fp32", "fp16")


@dataclass(frozen=True)
class ServedModel:
    """The parts of a running engine's config that determine the specs of its layers."""

    name: str
    architecture: str
    dtype: str
    cache: str
    """The cache dtype as given to vLLM: `auto`, `fp8`, ..."""
    tp: int
    kv_heads: int
    """KV heads of the whole model, if all layers have the same number."""
    max_len: int
    depth: int
    query_heads: int
    layers: Mapping[str, Layer] = field(default_factory=dict)
    """The layers that kvatlas reads from the model's config; empty for an unknown model."""

    @classmethod
    def of(cls, vllm_config: Any) -> ServedModel:
        """Read the served model from a `VllmConfig`."""
        served, parallel = vllm_config.model_config, vllm_config.parallel_config
        dtype, cache = dtype_name(served.dtype), str(vllm_config.cache_config.cache_dtype)
        return cls(
            name=str(served.model),
            architecture=str((getattr(served.hf_config, "architectures", None) or [""])[0]),
            dtype=dtype,
            cache=cache,
            tp=parallel.tensor_parallel_size,
            kv_heads=served.get_total_num_kv_heads(),
            max_len=served.max_model_len,
            depth=served.get_total_num_hidden_layers(),
            query_heads=served.model_arch_config.total_num_attention_heads,
            layers=_read_layers(served.hf_config, dtype, cache),
        )


def dtype_name(dtype: Any) -> str:
    """Return kvatlas's name of a torch dtype.

    >>> dtype_name("torch.float32")
    'fp32'
    """
    return DType.of(str(dtype).removeprefix("torch.")).name


def layer_spec(
    name: str,
    spec: Any,
    model: ServedModel,
    backend: str | None,
    seen: Visibility | None = None,
) -> AnySpec:
    """Return a layer's spec from vLLM's spec, the attention backend and the layer's visibility.

    If a group keeps all tokens, vLLM merges the specs of its layers, and the merged spec applies
    one window to all of them. The visibility of a single layer then comes from its module (`seen`)
    or from the model's config.
    """
    kind = type(spec).__name__
    if kind not in READ_CLASSES:
        hint = "Upgrade kvatlas, or serve the model without this connector"
        raise refused(name, f"a {kind}", hint)
    if kind == "CircularBufferSpec":
        return _ring(name, spec, model)
    if kind == "MambaSpec":
        return _recurrent(name, spec, model)
    if kind in ("MLAAttentionSpec", "SlidingWindowMLASpec"):
        return _latent(name, spec, model)
    told = seen_by_group(spec)
    if told != Visibility() and keeps_all_tokens(spec):
        told = seen or _seen_by_layer(name, model)
    return _dense(name, spec, model, backend, told)


def seen_by_group(spec: Any) -> Visibility:
    """Return the window or chunk in vLLM's spec of a group or a layer.

    >>> seen_by_group(type("SlidingWindowSpec", (), {"sliding_window": 64})()).window
    64
    """
    window = getattr(spec, "sliding_window", None)
    return Visibility(window=window, chunk=getattr(spec, "attention_chunk_size", None))


def keeps_all_tokens(spec: Any) -> bool:
    """Return whether vLLM keeps all tokens of a layer, even if its attention has a window."""
    return bool({kind.__name__ for kind in type(spec).__mro__} & set(_KEEPS_ALL))


def refused(layer: str, got: str, hint: str, problem: str = "") -> AtlasError:
    """Return the error for a layer whose cache cannot be described."""
    problem = problem or "kvatlas does not support the cache format of a layer"
    return AtlasError(Code.ENGINE_REFUSES, problem, got=f"{got} for {layer}", hint=hint)


def _read_layers(config: Any, dtype: str, cache: str) -> dict[str, Layer]:
    """Return the layers, by name, that kvatlas reads from a config; empty for an unknown model."""
    try:
        model = Model.load(config, dtype=dtype)
        if cache != "auto":
            model = model.with_cache(cache)
    except AtlasError:
        return {}
    return {layer.name: layer for layer in model.layers}


def _seen_by_layer(name: str, model: ServedModel) -> Visibility:
    """Return a layer's window or chunk from the model's config; raise if the model is unknown."""
    if name not in model.layers:
        got = f"architecture {model.architecture}, whose window per layer is unknown,"
        raise refused(name, got, "Remove --disable-hybrid-kv-cache-manager")
    return model.layers[name].spec.visibility


def _dense(
    name: str, spec: Any, model: ServedModel, backend: str | None, seen: Visibility
) -> AnySpec:
    """Return the spec of a layer with full, sliding-window, chunked or sink attention."""
    cache = cache_dtype(name, spec, model)
    packing = _packing(name, spec, cache, model, backend)
    about: dict[str, Any] = {
        "heads": _heads(name, spec.num_kv_heads, model),
        "head_dim": spec.head_size,
        "v_dim": None if spec.head_size_v == spec.head_size else spec.head_size_v,
        "dtype": dtype_name(spec.dtype) if cache == "auto" else model.dtype,
        "cache": cache,
        "packing": packing,
    }
    if type(spec).__name__ == "SinkFullAttentionSpec":
        return SinkAttention(**about, sink_tokens=spec.sink_len or 0, window=seen.window)
    if seen.window is not None:
        return SlidingAttention(**about, window=seen.window)
    if seen.chunk is not None:
        return ChunkedAttention(**about, chunk=seen.chunk)
    return FullAttention(**about)


def _heads(name: str, local: int, model: ServedModel) -> int:
    """Return the number of KV heads over all ranks; `local` is the number on one rank.

    A single head on a rank may be a replica. The result then comes from the config.
    """
    if local > 1 or model.tp == 1:
        return local * model.tp
    known = getattr(getattr(model.layers.get(name), "spec", None), "heads", None)
    for heads in (known, model.kv_heads):
        if heads and max(1, heads // model.tp) == local:
            return int(heads)
    hint = "Set --tensor-parallel-size to a divisor of the number of KV heads"
    raise refused(name, f"{local} KV heads per rank at tp {model.tp}", hint)


def cache_dtype(name: str, spec: Any, model: ServedModel) -> str:
    """Return a layer's cache dtype: `auto` if its cache is not quantised.

    Raise an error if kvatlas does not support the layer's quantisation mode.
    """
    mode = spec.kv_quant_mode.name.lower()
    if mode == "none":
        return "auto"
    if mode == "fp8_per_tensor":
        return "fp8_e5m2" if model.cache == "fp8_e5m2" else "fp8"
    if mode not in ATTENTION_CACHES:
        raise refused(name, f"cache dtype {mode!r}", "Set --kv-cache-dtype to auto or fp8")
    found: str = mode
    return found


def _packing(
    name: str, spec: Any, cache: str, model: ServedModel, backend: str | None
) -> Packing | None:
    """Return how a page stores K and V; None if V follows K for each token and head."""
    if backend == "CPU_ATTN" and dtype_name(spec.dtype) not in _CPU_DTYPES:
        # The CPU backend tiles bf16 and fp8 keys for the instruction set of the processor.
        hint = "Serve the model with --dtype float32 or --dtype float16"
        raise refused(name, f"{dtype_name(spec.dtype)} with {backend}", hint)
    if backend == "CPU_ATTN" and spec.head_size % 32:
        got = f"head size {spec.head_size}, not a multiple of 32, with {backend}"
        raise refused(name, got, "Serve the model on a GPU")
    if backend in _PACKINGS:
        return _PACKINGS[backend]
    slots, heads = spec.num_head_slots, spec.num_kv_heads
    if slots is None or slots == heads or cache == "nvfp4":
        return None
    if slots == 2 * heads:
        return "head_groups"
    if slots == 2:
        return "planes"
    got = f"an unknown page layout with {slots} head slots, {heads} KV heads and tp {model.tp}"
    raise refused(name, got, "Upgrade kvatlas")


def _latent(name: str, spec: Any, model: ServedModel) -> AnySpec:
    """Return the spec of an MLA layer or indexer from the model's config.

    Raise an error if the sizes in this spec differ from the sizes in vLLM's spec.
    """
    known = _known(name, model)
    page = known.page(spec.block_size, tp=model.tp)
    ours = (page.heads, page.states, page.content, page.nbytes)
    padded = spec.page_size_padded or page.nbytes
    theirs = (spec.num_heads, spec.num_states, spec.state_content_size_bytes, padded)
    if ours[:3] != theirs[:3] or page.nbytes > padded:
        got = f"H, N, C and bytes {theirs}, expected {ours} from the config,"
        raise refused(name, got, "Check --kv-cache-dtype, or upgrade kvatlas")
    return known


def _ring(name: str, spec: Any, model: ServedModel) -> Ring:
    """Return a ring's spec from the model's config, with the number of rows from vLLM's spec.

    Raise an error if any other size differs between the two specs.

    The number of rows depends on how many speculative tokens the engine decodes at once.
    """
    known = _known(name, model)
    if not isinstance(known, Ring):
        got = f"a ring from vLLM, and {type(known).__name__} from the config,"
        raise refused(name, got, "Upgrade kvatlas")
    if known.fills_page:
        return _whole_page(name, spec, known)
    own = msgspec.structs.replace(known, rows=max(spec.block_size, known.group))
    page = own.page(1, tp=model.tp)
    ours = (page.heads, page.states, page.content)
    theirs = (spec.num_heads, spec.num_states, spec.state_content_size_bytes)
    if ours != theirs:
        got = f"H, N and C {theirs}, expected {ours} from the config,"
        raise refused(name, got, "Upgrade kvatlas")
    return own


def _whole_page(name: str, spec: Any, known: Ring) -> Ring:
    """Return a ring whose rows fill a page, as in Step5.

    vLLM's tensor has a state for each token of a block, but the kernels divide the page into rows.
    """
    nbytes = spec.num_states * spec.state_content_size_bytes
    rows, rest = divmod(nbytes, known.row_bytes)
    if rest or rows < known.group or spec.num_heads != 1:
        got = f"a ring of {spec.num_heads} head(s) in pages of {nbytes} bytes, with rows of "
        raise refused(name, f"{got}{known.row_bytes} bytes", "Upgrade kvatlas")
    return msgspec.structs.replace(known, rows=rows)


def _recurrent(name: str, spec: Any, model: ServedModel) -> AnySpec:
    """Return the spec of a recurrent layer from the model's config.

    The dtypes of its states and the shape of its convolution state come from vLLM's spec.
    """
    known = _known(name, model)
    if not isinstance(known, Recurrent):
        raise refused(
            name,
            f"recurrent states from vLLM, and {type(known).__name__} from the config,",
            "Upgrade kvatlas",
        )
    if spec.tp_replicated and model.tp > 1:
        raise refused(name, f"states replicated at tp {model.tp}", "Set --tensor-parallel-size 1")
    shapes = [tuple(shape) for shape in spec.shapes]
    for candidate in _candidates(known, [dtype_name(dtype) for dtype in spec.dtypes]):
        page: Page = candidate.page(1, tp=model.tp)
        if [tuple(axis.size for axis in f.axes) for f in page.fields] == shapes:
            found: AnySpec = candidate
            return found
    ours = [tuple(axis.size for axis in f.axes) for f in known.page(1, tp=model.tp).fields]
    raise refused(name, f"state shapes {shapes}, expected {ours},", "Upgrade kvatlas")


def _candidates(known: Any, dtypes: list[str]) -> Iterator[Any]:
    """Yield variants of a recurrent spec, with `dtypes` as the dtypes of its states.

    Variants differ in the axis order of the convolution state, and in the number of additional
    inputs in this state for speculative decoding.
    """
    states = [state.name for state in known.layer_states()]
    if len(states) != len(dtypes):
        return
    names = [f"{state}_dtype" for state in states]
    changed = {name: d for name, d in zip(names, dtypes, strict=True) if hasattr(known, name)}
    own = msgspec.structs.replace(known, **changed)
    if not hasattr(own, "conv_order"):
        yield own
        return
    for order in ("TR", "RT"):
        for speculative in range(17):
            yield msgspec.structs.replace(own, conv_order=order, speculative=speculative)


def _known(name: str, model: ServedModel) -> AnySpec:
    if name not in model.layers:
        got = f"architecture {model.architecture}, which kvatlas cannot read,"
        raise refused(
            name, got, "Request support for the model, or serve it without this connector"
        )
    return model.layers[name].spec
