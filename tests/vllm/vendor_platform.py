"""The platform of a vendor: an engine that imports this has the builder of TEST_VENDOR."""

from __future__ import annotations

import os
from typing import Any

from vllm import platforms
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.core.kv_cache_planning import DefaultKVCacheConfigBuilder


class PlacesAsVllm(DefaultKVCacheConfigBuilder):  # type: ignore[misc]
    """A builder of its own that leaves everything to vLLM's."""

    def get_kv_cache_config_from_groups(
        self, vllm_config: Any, kv_cache_groups: list[Any], num_blocks: int
    ) -> Any:
        return super().get_kv_cache_config_from_groups(vllm_config, kv_cache_groups, num_blocks)


class PlacesElsewhere(DefaultKVCacheConfigBuilder):  # type: ignore[misc]
    """Pages that do not fill their block begin 128 bytes later."""

    def get_kv_cache_config_from_groups(
        self, vllm_config: Any, kv_cache_groups: list[Any], num_blocks: int
    ) -> Any:
        made = super().get_kv_cache_config_from_groups(vllm_config, kv_cache_groups, num_blocks)
        if len({group.kv_cache_spec.page_size_bytes for group in kv_cache_groups}) > 1:
            for tensor in made.kv_cache_tensors:
                tensor.offset += 128
        return made


class GroupsItself(DefaultKVCacheConfigBuilder):  # type: ignore[misc]
    """A builder that decides on groups, although these are vLLM's."""

    def get_kv_cache_groups(self, vllm_config: Any, kv_cache_spec: dict[str, Any]) -> Any:
        return super().get_kv_cache_groups(vllm_config, kv_cache_spec)


class VendorPlatform(CpuPlatform):  # type: ignore[misc]
    @classmethod
    def get_kv_cache_config_builder_cls(cls, vllm_config: Any) -> str:  # noqa: ARG003
        return f"{__name__}.{os.environ['TEST_VENDOR']}"


if "TEST_VENDOR" in os.environ:
    platforms.current_platform = VendorPlatform()
