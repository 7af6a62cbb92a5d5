"""Imports of SGLang and LMCache in an environment without a GPU.

Their wheels are installed without dependencies, see `make test-other-engines`. SGLang imports
torchvision for the pictures of multimodal models, and torchvision's compiled operators need the
torch that they were built with. So this package is replaced by an empty one. The pools ask SGLang's
model runner whether CUDA graphs are being captured; its module, which imports all of the server, is
replaced by that one answer. All else is real.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest


def sglang(module: str) -> Any:
    """Import a module of SGLang; skip the test where SGLang is not installed."""
    if find_spec("sglang") is None:
        pytest.skip("SGLang is not installed: make test-other-engines", allow_module_level=True)
    if "torchvision" not in sys.modules:
        importlib.import_module("transformers.image_utils")  # before torchvision seems installed
        pictures = ModuleType("torchvision")
        pictures.__path__ = []
        sys.modules["torchvision"] = pictures
        for name in ("transforms", "transforms.functional"):
            part: Any = ModuleType(f"torchvision.{name}")
            part.__path__, part.InterpolationMode = (
                [],
                type("InterpolationMode", (), {"BICUBIC": 3}),
            )
            sys.modules[f"torchvision.{name}"] = part
        pictures.transforms = sys.modules["torchvision.transforms"]  # type: ignore[attr-defined]
        runner: Any = ModuleType("sglang.srt.model_executor.runner")
        runner.get_is_capture_mode = lambda: False
        sys.modules[runner.__name__] = runner
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"sglang.srt.{module}")


def lmcache(module: str) -> Any:
    """Import a module of LMCache; skip the test where LMCache is not installed."""
    if find_spec("lmcache") is None:
        pytest.skip("LMCache is not installed: make test-other-engines", allow_module_level=True)
    return importlib.import_module(f"lmcache.{module}")
