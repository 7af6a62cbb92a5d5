"""Objects in the shapes of vLLM's, for tests that run without it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any


class Quantised(Enum):
    NONE = 0


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    block_size: int
    num_kv_heads: int = 2
    head_size: int = 32
    head_size_v: int = 32
    dtype: str = "torch.float32"
    kv_quant_mode: Quantised = Quantised.NONE
    num_head_slots: int | None = None
    page_size_padded: int | None = None
    item: int = 4

    @property
    def num_heads(self) -> int:
        return self.num_head_slots or self.num_kv_heads

    @property
    def state_content_size_bytes(self) -> int:
        return (self.head_size + self.head_size_v) * self.item

    def get_num_kernel_states(self, block: int) -> int:
        return block


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    sliding_window: int | None = None


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    sliding_window: int = 64


@dataclass(frozen=True, kw_only=True)
class MambaSpec:
    block_size: int = 1024
    mamba_cache_mode: str = "none"


@dataclass
class Group:
    kv_cache_spec: Any
    layer_names: list[str] = field(default_factory=list)


@dataclass
class Config:
    """A KVCacheConfig: layer by layer, all groups from byte 0 on."""

    groups: list[Group]
    num_blocks: int = 16
    kv_cache_layout: str = "LBHNC"

    @property
    def transfer_groups(self) -> list[Group]:
        return self.groups

    @property
    def transfer_group_ids(self) -> tuple[int, ...]:
        return tuple(range(len(self.groups)))

    @property
    def kv_cache_tensors(self) -> list[Any]:
        tensors = []
        for group in self.groups:
            spec = group.kv_cache_spec
            page = spec.num_heads * spec.block_size * spec.state_content_size_bytes
            tensors.append(
                SimpleNamespace(
                    layers=group.layer_names,
                    layer_stride=page * self.num_blocks,
                    block_stride=page,
                    offset=0,
                )
            )
        return tensors


def vllm_config(*, tp: int = 1, caching: bool = False, kv_heads: int = 2, **model: Any) -> Any:
    served = SimpleNamespace(
        model="tiny",
        dtype="torch.float32",
        max_model_len=1024,
        hf_config=SimpleNamespace(architectures=["Tiny"]),
        get_total_num_kv_heads=lambda: kv_heads,
        get_total_num_hidden_layers=lambda: 2,
        model_arch_config=SimpleNamespace(total_num_attention_heads=4),
        **model,
    )
    return SimpleNamespace(
        model_config=served,
        parallel_config=SimpleNamespace(tensor_parallel_size=tp),
        cache_config=SimpleNamespace(cache_dtype="auto", enable_prefix_caching=caching),
        kv_transfer_config=SimpleNamespace(engine_id="engine"),
    )


class Request:
    """A request as vLLM's scheduler has it."""

    def __init__(self, name: str, tokens: int, params: Any = None, status: str = "") -> None:
        self.request_id = name
        self.prompt_token_ids: list[int] | None = list(range(tokens))
        self._all_token_ids = list(range(tokens))
        self.num_prompt_tokens = tokens
        self.num_computed_tokens = tokens
        self.num_in_flight_tokens = 0
        self.max_tokens = 8
        self.cache_salt: str | None = None
        self.kv_transfer_params = params
        self.status = SimpleNamespace(name=status or "FINISHED_LENGTH_CAPPED")

    @property
    def all_token_ids(self) -> list[int]:
        return self._all_token_ids

    @property
    def num_tokens(self) -> int:
        return len(self._all_token_ids)


class Blocks:
    def __init__(self, *ids: list[int]) -> None:
        self.ids = ids

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self.ids


class Managers:
    """A KVCacheManager, as far as the connector looks into it."""

    def __init__(self, groups: int) -> None:
        pool = SimpleNamespace()
        one = [
            SimpleNamespace(num_cached_block={}, req_to_blocks={}, block_pool=pool)
            for _ in range(groups)
        ]
        self.coordinator = SimpleNamespace(single_type_managers=one)

    def cached(self, group: int) -> dict[str, int]:
        found: dict[str, int] = self.coordinator.single_type_managers[group].num_cached_block
        return found
