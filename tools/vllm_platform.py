"""A platform for vLLM that answers like a GPU which this machine does not have.

vLLM's modules are imported with the answers of the CPU, because a GPU's kernels cannot be
loaded here. Afterwards `pretend()` replaces the answers by those of a chip.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

CHIPS = {"sm80": (8, 0), "sm90": (9, 0), "sm100": (10, 0)}
CUDA = 13
"""The major CUDA version with which the wheels of vLLM are built."""
_FLASH_ATTENTION = {8: 2, 9: 3, 10: 4}
"""The version of FlashAttention that vLLM selects, by major compute capability."""

_STEP5 = tuple(
    f"vllm.models.step5.nvidia.{name}"
    for name in (
        "flashinfer_sparse",
        "model",
        "mtp",
        "ops",
        "ops.attention_gate",
        "ops.sparse_prefill",
        "ops.sparse_prefill_pages",
        "ops.summary_update",
        "vl",
    )
)
"""Modules of Step5 whose kernels need Triton."""


class _Anything(type):
    """The class of classes that are not installed: every attribute of them is None."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)


class _Placeholder(ModuleType):
    """A module of a package that is not installed: every name in it is an empty class."""

    __version__ = "99.0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds FlashInfer, whose kernels are selected here but never called, and torchvision."""

    def find_spec(self, name: str, _path: Sequence[str] | None, _target: Any = None) -> Any:
        if name.split(".")[0] not in ("flashinfer", "flashinfer_cubin", "torchvision"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Placeholder(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module has no code."""


class _Proxy:
    """The platform object that vLLM's modules import; its answers can be replaced."""

    def __init__(self, platform: Any) -> None:
        object.__setattr__(self, "_now", platform)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_now"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_now"), name, value)


def install() -> None:
    """Import vLLM's planner and layers with the answers of the CPU."""
    import vllm.platforms as platforms
    from vllm.platforms.cpu import CpuPlatform

    if getattr(platforms._current_platform, "_now", None) is None:
        platforms._current_platform = _Proxy(CpuPlatform())
    import vllm.model_executor.layers.attention.attention
    import vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn
    import vllm.model_executor.layers.mamba.mamba_mixer2
    import vllm.models.kimi_k3.nvidia.kda
    import vllm.v1.core.kv_cache_utils
    import vllm.v1.worker.utils  # noqa: F401

    sys.meta_path.insert(0, _Finder())
    for name in ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"):
        sys.modules.setdefault(name, ModuleType(name))
    _take_kernels_as_built()


def _take_kernels_as_built() -> None:
    """Replace the checks for compiled kernels, which a CUDA wheel contains and this one lacks."""
    import vllm.utils.flashinfer as flashinfer
    import vllm.v1.attention.backends.fa_utils as fa_utils

    def yes(*_: Any, **__: Any) -> bool:
        return True

    vars(fa_utils)["__getattr__"] = lambda _name: None  # kernels that other modules import
    vars(fa_utils)["get_flash_attn_version"] = lambda *_, **__: _FLASH_ATTENTION[_major()]
    kernels = _Placeholder("vllm.vllm_flash_attn")
    interface = _Placeholder("vllm.vllm_flash_attn.flash_attn_interface")
    vars(interface)["is_fa_version_supported"] = yes
    vars(kernels).update(flash_attn_interface=interface, is_fa_version_supported=yes)
    # Kernels in CuTe, which a CUDA wheel compiles when they run.
    names = ("vllm.vllm_flash_attn.cute", "vllm.vllm_flash_attn.cute.interface", *_STEP5)
    compiled = [_Placeholder(name) for name in (*names, "vllm.models.minimax_m3.nvidia.ops")]
    sys.modules |= {one.__name__: one for one in (kernels, interface, *compiled)}
    vars(fa_utils)["flash_attn_supports_mla"] = yes
    # This module allocates GPU memory when it is imported; FLASHINFER_MLA comes before it.
    sys.modules["vllm.v1.attention.backends.mla.cutlass_mla"] = None  # type: ignore[assignment]
    import vllm.v1.attention.ops.flashmla as flashmla

    for name in ("is_flashmla_dense_supported", "is_flashmla_sparse_supported"):
        vars(flashmla)[name] = lambda: (True, None)
    for name in ("has_flashinfer", "has_nvidia_artifactory"):
        vars(flashinfer)[name] = yes
    vars(flashinfer)["has_flashinfer_sm90_nope_mla"] = lambda: False


def _major() -> int:
    from vllm.platforms import current_platform

    return int(current_platform.get_device_capability().major)


def pretend(chip: str) -> Any:
    """Replace vLLM's platform by a GPU of this chip, and return it."""
    import vllm.platforms as platforms
    from vllm.platforms.cuda import CudaPlatformBase, _get_backend_priorities
    from vllm.platforms.interface import DeviceCapability

    capability = DeviceCapability(*CHIPS[chip])

    class Pretended(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, *_: Any, **__: Any) -> Any:
            return capability

        @classmethod
        def get_cuda_runtime_major(cls) -> int:
            return CUDA

    _get_backend_priorities.cache_clear()
    platform = Pretended()
    object.__setattr__(platforms._current_platform, "_now", platform)
    return platform
