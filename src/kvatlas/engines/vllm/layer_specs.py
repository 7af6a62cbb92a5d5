"""vLLM's cache specs as kvatlas's: what each layer keeps, of the whole model.

vLLM's specs say what one rank holds, kvatlas's what the model's layer is. Dense attention
follows from the spec and the number of ranks. What a spec does not say (the sections of a
convolution, the rotary part of a latent) comes from the model's config, and is held against
the bytes of vLLM's spec: where they differ, the layer is refused.

Classes of vLLM are known by their names, so that nothing is imported from it.
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
    AnySpec,
    ChunkedAttention,
    FullAttention,
    Packing,
    Recurrent,
    SinkAttention,
    SlidingAttention,
    Visibility,
)

_PACKINGS: dict[str, Packing] = {"CPU_ATTN": "transposed", "ROCM_ATTN": "tiled_planes"}
"""Backends that keep K and V elsewhere than one behind the other in each cell."""

_KEEPS_ALL = ("FullAttentionSpec",)
_UNKNOWN = ("RSWASpec", "CircularBufferSpec", "HiddenStateCacheSpec", "CrossAttentionSpec")
_CPU_DTYPES = ("fp32", "fp16")


@dataclass(frozen=True)
class ServedModel:
    """What of a running engine's config its layers' specs depend on."""

    name: str
    architecture: str
    dtype: str
    cache: str
    """The cache dtype as vLLM was asked for it: `auto`, `fp8`, ..."""
    tp: int
    kv_heads: int
    """Key and value heads of the whole model, where all layers have as many."""
    max_len: int
    depth: int
    query_heads: int
    layers: Mapping[str, Layer] = field(default_factory=dict)
    """The layers as kvatlas reads them from the model's config; those that it knows."""

    @classmethod
    def of(cls, vllm_config: Any) -> ServedModel:
        """The model that an engine serves."""
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
    """A torch dtype by kvatlas's name for it.

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
    """What a layer keeps, from vLLM's spec of it, the backend that reads it, and what it sees.

    Where all tokens are kept, vLLM's spec is that of a whole group, and says its windows of
    all layers: what one of them really sees comes from its module, or from the model's config.
    """
    kinds = {kind.__name__ for kind in type(spec).__mro__}
    if unknown := kinds & set(_UNKNOWN):
        raise refused(name, f"a {unknown.pop()}", "Serve the model without this connector")
    if "MambaSpec" in kinds:
        return _recurrent(name, spec, model)
    if kinds & {"MLAAttentionSpec", "SlidingWindowMLASpec"}:
        return _latent(name, spec, model)
    if "AttentionSpec" not in kinds:
        raise refused(name, f"a {type(spec).__name__}", "Upgrade kvatlas, or leave it out")
    told = seen_by_group(spec)
    if told != Visibility() and keeps_all_tokens(spec):
        told = seen or _seen_by_layer(name, model)
    return _dense(name, spec, kinds, model, backend, told)


def seen_by_group(spec: Any) -> Visibility:
    """The windows or chunks of a group, as vLLM's spec says them.

    >>> seen_by_group(type("SlidingWindowSpec", (), {"sliding_window": 64})()).window
    64
    """
    window = getattr(spec, "sliding_window", None)
    return Visibility(window=window, chunk=getattr(spec, "attention_chunk_size", None))


def keeps_all_tokens(spec: Any) -> bool:
    """Whether vLLM keeps all tokens of a layer, also where it sees a window alone."""
    return bool({kind.__name__ for kind in type(spec).__mro__} & set(_KEEPS_ALL))


def refused(layer: str, got: str, hint: str, problem: str = "") -> AtlasError:
    """A layer's cache that cannot be described."""
    problem = problem or "vLLM keeps a layer's cache in a way that kvatlas does not know"
    return AtlasError(Code.ENGINE_REFUSES, problem, got=f"{got} for {layer}", hint=hint)


def _read_layers(config: Any, dtype: str, cache: str) -> dict[str, Layer]:
    """The layers of a model that kvatlas reads by itself; none of one that it does not know."""
    try:
        model = Model.load(config, dtype=dtype)
        if cache != "auto":
            model = model.with_cache(cache)
    except AtlasError:
        return {}
    return {layer.name: layer for layer in model.layers}


def _seen_by_layer(name: str, model: ServedModel) -> Visibility:
    """What a layer sees, by the model's config."""
    if name not in model.layers:
        got = f"windows of a group, of which {model.architecture}'s config does not say whose"
        raise refused(name, got, "Turn the hybrid cache manager on")
    return model.layers[name].spec.visibility


def _dense(
    name: str,
    spec: Any,
    kinds: set[str],
    model: ServedModel,
    backend: str | None,
    seen: Visibility,
) -> AnySpec:
    """Attention with K and V: full, or of which a window or a chunk is seen."""
    cache = _cache(name, spec, model)
    packing = _packing(name, spec, cache, model, backend)
    about: dict[str, Any] = {
        "heads": _heads(name, spec.num_kv_heads, model),
        "head_dim": spec.head_size,
        "v_dim": None if spec.head_size_v == spec.head_size else spec.head_size_v,
        "dtype": dtype_name(spec.dtype) if cache == "auto" else model.dtype,
        "cache": cache,
        "packing": packing,
    }
    if "SinkFullAttentionSpec" in kinds:
        return SinkAttention(**about, sink_tokens=spec.sink_len or 0, window=seen.window)
    if seen.window is not None:
        return SlidingAttention(**about, window=seen.window)
    if seen.chunk is not None:
        return ChunkedAttention(**about, chunk=seen.chunk)
    return FullAttention(**about)


def _heads(name: str, local: int, model: ServedModel) -> int:
    """Key and value heads of the whole model: a rank that holds one may hold a replica."""
    if local > 1 or model.tp == 1:
        return local * model.tp
    known = getattr(getattr(model.layers.get(name), "spec", None), "heads", None)
    for heads in (known, model.kv_heads):
        if heads and max(1, heads // model.tp) == local:
            return int(heads)
    raise refused(name, f"{local} kv heads a rank at tp {model.tp}", "Use another tp")


def _cache(name: str, spec: Any, model: ServedModel) -> str:
    """The cache dtype; with one scale for the tensor, both ends read it from the checkpoint."""
    mode = spec.kv_quant_mode.name.lower()
    if mode == "none":
        return "auto"
    if mode == "fp8_per_tensor":
        return "fp8_e5m2" if model.cache == "fp8_e5m2" else "fp8"
    if mode in ("ultraquant_4bit", "nvfp4_ds_mla"):
        raise refused(name, f"cache dtype {mode}", "Use another cache dtype")
    return str(mode)


def _packing(
    name: str, spec: Any, cache: str, model: ServedModel, backend: str | None
) -> Packing | None:
    """Where K and V sit in a page: what the backend does, or what the numbers of cells say."""
    if backend == "CPU_ATTN" and dtype_name(spec.dtype) not in _CPU_DTYPES:
        # bf16 and fp8 keys are tiled by the processor's own instructions.
        hint = "Serve it with dtype float32 or float16"
        raise refused(name, f"{dtype_name(spec.dtype)} with {backend}", hint)
    if backend == "CPU_ATTN" and spec.head_size % 32:
        raise refused(name, f"heads of {spec.head_size} with {backend}", "Use a GPU backend")
    if backend in _PACKINGS:
        return _PACKINGS[backend]
    slots, heads = spec.num_head_slots, spec.num_kv_heads
    if slots is None or slots == heads or cache == "nvfp4":
        return None
    if slots == 2 * heads:
        return "head_groups"
    if slots == 2:
        return "planes"
    raise refused(name, f"{slots} head slots of {heads} heads at tp {model.tp}", "Upgrade kvatlas")


def _latent(name: str, spec: Any, model: ServedModel) -> AnySpec:
    """Latent attention or an indexer, as the model's config says, in as many bytes as vLLM's."""
    known = _known(name, model)
    page = known.page(spec.block_size, tp=model.tp)
    ours = (page.heads, page.states, page.content, page.nbytes)
    padded = spec.page_size_padded or page.nbytes
    theirs = (spec.num_heads, spec.num_states, spec.state_content_size_bytes, padded)
    if ours[:3] != theirs[:3] or page.nbytes > padded:
        got = f"H, N, C and bytes of {theirs} where the config says {ours}"
        raise refused(name, got, "Check the cache dtype, or upgrade kvatlas")
    return known


def _recurrent(name: str, spec: Any, model: ServedModel) -> AnySpec:
    """A recurrent layer, as the model's config says, with the shapes and dtypes of vLLM's."""
    known = _known(name, model)
    if not isinstance(known, Recurrent):
        raise refused(name, f"states where the config has {type(known).__name__}", "Upgrade")
    if spec.tp_replicated and model.tp > 1:
        raise refused(name, f"states that tp {model.tp} replicates", "Use tp 1")
    shapes = [tuple(shape) for shape in spec.shapes]
    for candidate in _candidates(known, [dtype_name(dtype) for dtype in spec.dtypes]):
        page: Page = candidate.page(1, tp=model.tp)
        if [tuple(axis.size for axis in f.axes) for f in page.fields] == shapes:
            found: AnySpec = candidate
            return found
    ours = [tuple(axis.size for axis in f.axes) for f in known.page(1, tp=model.tp).fields]
    raise refused(name, f"states of {shapes} where the config says {ours}", "Upgrade kvatlas")


def _candidates(known: Any, dtypes: list[str]) -> Iterator[Any]:
    """The spec in these dtypes, with its convolution either way round and further taps."""
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
        got = f"{model.architecture}, whose config does not say what it keeps"
        raise refused(name, got, "Ask for the model to be read by kvatlas.models")
    return model.layers[name].spec
