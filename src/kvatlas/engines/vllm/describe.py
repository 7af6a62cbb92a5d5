"""Derive the plan of a running vLLM engine from its `KVCacheConfig`, without reading its memory.

Each pipeline stage describes its own layers. The descriptions of all stages form the plan of the
engine, which is the same on every rank. `check_tensors` then compares this plan with the tensors
that vLLM allocated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec

from kvatlas.engines.vllm.layer_specs import (
    ServedModel,
    keeps_all_tokens,
    layer_spec,
    refused,
    seen_by_group,
)
from kvatlas.errors import AtlasError, Code
from kvatlas.geometry import Layout, Placement
from kvatlas.models import Layer, Model
from kvatlas.planning import Plan, foreign
from kvatlas.specs import AnySpec, Ring, Visibility
from kvatlas.specs.scale_location import in_layout

_STATE_MODES = ("none", "align")


class DescribedLayer(msgspec.Struct, frozen=True, kw_only=True):
    """One layer's cache: its spec, its sizes and byte strides in memory, and its group index."""

    layer: Layer
    sizes: tuple[int, ...]
    """Sizes of B, H, N and C: B counts kernel blocks, C bytes."""
    strides: tuple[int, ...]
    offset: int
    block: int
    """Tokens per block."""
    group: int
    full: bool
    """Whether the cache keeps all tokens, even if the layer attends to a window only."""

    @property
    def placement(self) -> Placement:
        """The layer's axes in the allocation: kernel blocks, heads, tokens and bytes per head.

        If a ring fills a page, the axis for tokens counts the rows of the ring.
        """
        sizes, strides, spec = self.sizes, self.strides, self.layer.spec
        if isinstance(spec, Ring) and spec.fills_page:
            row = spec.row_bytes
            sizes = (sizes[0], 1, spec.rows, row)
            strides = (strides[0], spec.rows * row, row, strides[3])
        return Placement(("B", "H", "N", "C"), sizes, strides, self.offset)


class DescribedStage(msgspec.Struct, frozen=True, kw_only=True):
    """The caches of one pipeline stage, as pure data that stages exchange."""

    model: str
    architecture: str
    tp: int
    max_len: int
    depth: int
    query_heads: int
    groups: int
    layers: tuple[DescribedLayer, ...]


def describe_engine(
    vllm_config: Any,
    kv_cache_config: Any,
    *,
    backends: Mapping[str, str] | None = None,
    kernel_blocks: Mapping[str, int] | None = None,
    seen: Mapping[str, Visibility] | None = None,
) -> Plan:
    """Return the plan of an engine with one pipeline stage, from vLLM's configs.

    Three mappings are keyed by layer name. `backends` contains the names of attention backends.
    `kernel_blocks` contains the tokens per kernel block, for layers whose blocks vLLM splits.
    `seen` contains the sliding window, or the attention chunk size, of layers that have one.
    """
    about: dict[str, Any] = {"backends": backends, "kernel_blocks": kernel_blocks, "seen": seen}
    return join_stages([describe_stage(vllm_config, kv_cache_config, **about)])


def describe_stage(
    vllm_config: Any,
    kv_cache_config: Any,
    *,
    backends: Mapping[str, str] | None = None,
    kernel_blocks: Mapping[str, int] | None = None,
    seen: Mapping[str, Visibility] | None = None,
) -> DescribedStage:
    """Describe the caches of one pipeline stage. `describe_engine` explains the arguments."""
    _check_topology(vllm_config, kv_cache_config)
    model = ServedModel.of(vllm_config)
    specs = {
        name: (index, _own_spec(group.kv_cache_spec, name))
        for index, group in enumerate(kv_cache_config.transfer_groups)
        for name in group.layer_names
    }
    told = _own_windows(kv_cache_config) | dict(seen or {})
    layout, kept = Layout(str(kv_cache_config.kv_cache_layout)), {}
    for name, (_, spec) in specs.items():
        own = layer_spec(name, spec, model, (backends or {}).get(name), told.get(name))
        kept[name] = cast("AnySpec", in_layout(own, layout))
    for name, (_, spec) in specs.items():
        check_windows(name, spec, kept[name].visibility)
    placed = dict(_placed_layers(kv_cache_config, kernel_blocks or {}))
    layers = []
    for name, (index, spec) in specs.items():
        if name not in placed:
            raise refused(name, "no tensor", "Upgrade kvatlas", _NO_TENSOR)
        sizes, strides, offset = placed[name]
        own, block = kept[name], spec.block_size
        if isinstance(own, Ring) and own.fills_page:
            block = own.rows
            if strides[2] != sizes[3]:
                got = f"a ring whose page is not contiguous in {layout}"
                raise refused(name, got, "Serve the model without this connector")
        layers.append(
            DescribedLayer(
                layer=Layer(name=name, index=_index(name), spec=own),
                sizes=sizes,
                strides=strides,
                offset=offset,
                block=block,
                group=index,
                full=keeps_all_tokens(spec),
            )
        )
    return DescribedStage(
        model=model.name,
        architecture=model.architecture,
        tp=model.tp,
        max_len=model.max_len,
        depth=model.depth,
        query_heads=model.query_heads,
        groups=len(kv_cache_config.transfer_groups),
        layers=tuple(layers),
    )


def join_stages(stages: Sequence[DescribedStage]) -> Plan:
    """Return the plan of a whole engine from its pipeline stages, in stage order."""
    first = stages[0]
    if len({msgspec.structs.replace(stage, layers=()) for stage in stages}) > 1:
        raise AtlasError(
            Code.ENGINE_REFUSES,
            "The workers of the pipeline stages have different settings",
            got=_first_difference(stages),
            hint="Start all workers with the same arguments",
        )
    layers = [described for stage in stages for described in stage.layers]
    return foreign(
        described_model(stages),
        [{one.layer.name: one.placement for one in stage.layers} for stage in stages],
        tp=first.tp,
        max_len=first.max_len,
        groups=[
            [one.layer.name for one in layers if one.group == group]
            for group in range(first.groups)
        ],
        blocks={one.layer.name: one.block for one in layers},
        pools=[0] * first.groups,
        full={one.layer.name for one in layers if one.full},
    )


def _first_difference(stages: Sequence[DescribedStage]) -> str:
    """Return the first field that differs between stages, with its values in stage order."""
    for name in DescribedStage.__struct_fields__:
        values = [getattr(stage, name) for stage in stages]
        if name != "layers" and len(set(values)) > 1:
            return f"{name} {', '.join(map(repr, values))}"
    return ""


def described_model(stages: Sequence[DescribedStage]) -> Model:
    """Return the model that an engine serves, with the layers of all stages."""
    first = stages[0]
    return Model(
        name=first.model,
        architecture=first.architecture,
        layers=tuple(described.layer for stage in stages for described in stage.layers),
        depth=first.depth,
        attention_heads=first.query_heads,
        max_len=first.max_len,
    )


def check_tensors(plan: Plan, stage: DescribedStage, tensors: Mapping[str, Any]) -> int:
    """Check every tensor that vLLM allocated against the plan; return the pool's address.

    The tensors are torch tensors of this process. Raise an error that names the first layer whose
    pointer, shape or strides differ from the plan.
    """
    missing = sorted({one.layer.name for one in stage.layers} ^ set(tensors))
    if missing:
        got = "a tensor without a spec" if missing[0] in tensors else "no tensor"
        raise refused(missing[0], got, "Upgrade kvatlas", _UNLIKE)
    base = tensors[stage.layers[0].layer.name].data_ptr() - stage.layers[0].offset
    for one in stage.layers:
        name, tensor = one.layer.name, tensors[one.layer.name]
        item = tensor.element_size()
        shape = (*tensor.shape[:-1], tensor.shape[-1] * item)
        strides = tuple(stride * item for stride in tensor.stride()[:-1])
        begin = tensor.data_ptr() - one.offset
        if tensor.stride()[-1] != 1:
            got = f"stride {tensor.stride()[-1]} of the last axis, expected 1,"
            raise refused(name, got, "Upgrade kvatlas", _UNLIKE)
        if shape != one.sizes or begin != base:
            expected = f"{one.sizes} at {base + one.offset}"
            got = f"byte shape {shape} at {tensor.data_ptr()}, expected {expected},"
            raise refused(name, got, "Upgrade kvatlas", _UNLIKE)
        stepping = [a != b for a, b, n in zip(strides, one.strides, shape, strict=False) if n > 1]
        if any(stepping):
            got = f"byte strides {strides}, expected {one.strides[:-1]},"
            raise refused(name, got, "Upgrade kvatlas", _UNLIKE)
        storage = tensor.untyped_storage()
        end = base + plan.pool_of(name).nbytes
        if base < storage.data_ptr() or end > storage.data_ptr() + storage.nbytes():
            got = f"a torch storage of {storage.nbytes():,} bytes that does not contain the "
            got += f"pool of {end - base:,} bytes"
            raise refused(name, got, "Upgrade kvatlas", _UNLIKE)
    return int(base)


_UNLIKE = "The cache that vLLM allocated for a layer does not match vLLM's KVCacheConfig"
_NO_TENSOR = "vLLM's KVCacheConfig has a spec but no tensor for a layer"


def _check_topology(vllm_config: Any, kv_cache_config: Any) -> None:
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise AtlasError(
                Code.ENGINE_REFUSES,
                "The connector does not support context parallelism",
                got=f"{name}={getattr(parallel, name)}",
                hint=f"Set {name} to 1, and use tensor, pipeline or data parallelism",
            )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise AtlasError(
            Code.ENGINE_REFUSES,
            "The connector does not support engines that compute their own KV scales",
            got="calculate_kv_scales=True",
            hint="Start the engine without --calculate-kv-scales, to use the checkpoint's scales",
        )
    for group in kv_cache_config.transfer_groups:
        mode = getattr(group.kv_cache_spec, "mamba_cache_mode", "none")
        if mode not in _STATE_MODES:
            hint = 'Set mamba_cache_mode to "none" or "align"'
            raise refused(group.layer_names[0], f"mamba_cache_mode {mode!r}", hint)


def _own_windows(config: Any) -> dict[str, Visibility]:
    """Return the window or chunk of each layer by name, for groups with one spec per layer."""
    return {
        name: seen_by_group(spec)
        for group in config.transfer_groups
        for name, spec in (getattr(group.kv_cache_spec, "kv_cache_specs", None) or {}).items()
    }


def check_windows(name: str, spec: Any, seen: Visibility) -> None:
    """Raise an error if vLLM's spec of a group lacks the window `seen` of one of its layers.

    Only groups that keep all tokens are checked. vLLM's scheduler reads only the group's spec; if
    the window is missing in that spec, the scheduler treats the layer as full attention.
    """
    if (
        keeps_all_tokens(spec)
        and (seen.window or seen.chunk)
        and seen_by_group(spec) == Visibility()
    ):
        got = f"a window of {seen.window or seen.chunk} tokens, and no window in the group's spec,"
        raise refused(name, got, "Remove --disable-hybrid-kv-cache-manager")


def _own_spec(spec: Any, layer: str) -> Any:
    """Return vLLM's spec of one layer, from the spec of its group.

    A group has either a spec for each layer or one spec for all layers.
    """
    several = getattr(spec, "kv_cache_specs", None)
    return spec if several is None else several[layer]


def _placed_layers(
    config: Any, kernel_blocks: Mapping[str, int]
) -> Iterator[tuple[str, tuple[tuple[int, ...], tuple[int, ...], int]]]:
    """Yield (layer name, (axis sizes, byte strides, byte offset)) of vLLM's view of each layer.

    The axes are kernel blocks, heads, tokens and bytes.
    """
    specs = {
        name: _own_spec(group.kv_cache_spec, name)
        for group in config.transfer_groups
        for name in group.layer_names
    }
    for tensor in config.kv_cache_tensors:
        for position, name in enumerate(tensor.layers):
            if name not in specs:
                continue
            spec = specs[name]
            kernel = kernel_blocks.get(name, spec.block_size)
            split = spec.block_size // kernel
            shape = {
                "L": len(tensor.layers),
                "B": config.num_blocks * split,
                "H": spec.num_heads,
                "N": spec.get_num_kernel_states(kernel),
                "C": spec.state_content_size_bytes,
            }
            fixed = {"L": tensor.layer_stride, "B": tensor.block_stride // split}
            strides: dict[str, int] = {}
            step = 1
            for axis in reversed(str(config.kv_cache_layout)):
                strides[axis] = fixed.get(axis, step)
                step = strides[axis] * shape[axis]
            sizes = tuple(shape[axis] for axis in "BHNC")
            offset = tensor.offset + position * tensor.layer_stride
            yield name, (sizes, tuple(strides[axis] for axis in "BHNC"), offset)


def _index(name: str) -> int:
    """Return the number in a layer's name, such as 3 in `layers.3.attn`; 0 if there is none."""
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else 0
