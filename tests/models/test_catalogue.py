"""The built-in catalogue: complete, sourced, and right to the byte."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources

import msgspec
import pytest

from kvatlas.models import Model, catalogue
from kvatlas.models.known_models import CatalogueEntry
from kvatlas.specs import (
    ChunkedAttention,
    CompressorState,
    CrossAttention,
    SlidingAttention,
    SlidingLatentAttention,
    Spec,
)
from tests.cases import each

# Of one request on one rank, with vLLM's state dtypes: bytes for each further token,
# bytes of full windows, bytes of states.
FIGURES: dict[str, tuple[float, int, int]] = {
    "Llama-3.1-8B": (131072, 0, 0),
    "Llama-3.1-70B": (327680, 0, 0),
    "Llama-3.1-405B": (516096, 0, 0),
    "Llama-4-Scout": (49152, 1207959552, 0),
    "Llama-4-Maverick": (49152, 1207959552, 0),
    "Mistral-7B-v0.1": (0, 536870912, 0),
    "Gemma-2-2b": (53248, 218103808, 0),
    "Gemma-2-9b": (172032, 704643072, 0),
    "Gemma-2-27b": (188416, 771751936, 0),
    "Gemma-3-27B": (81920, 436207616, 0),
    "Gemma-4-26B-A4B": (20480, 209715200, 0),
    "Gemma-4-31B": (81920, 838860800, 0),
    "gpt-oss-20b": (24576, 3145728, 0),
    "gpt-oss-120b": (36864, 4718592, 0),
    "Qwen3-8B": (147456, 0, 0),
    "Qwen3-32B": (262144, 0, 0),
    "Qwen3-30B-A3B": (98304, 0, 0),
    "Qwen3-235B-A22B": (192512, 0, 0),
    "Qwen3-Next-80B-A3B": (24576, 0, 39518208),
    "Qwen3.5-35B-A3B": (20480, 0, 64389120),
    "Qwen3.5-397B-A17B": (30720, 0, 192061440),
    "Qwen3.6-27B": (65536, 0, 153944064),
    "Qwen3.6-35B-A3B": (20480, 0, 64389120),
    "DeepSeek-V2-Lite": (31104, 0, 0),
    "DeepSeek-V3": (70272, 0, 0),
    "DeepSeek-R1": (70272, 0, 0),
    "DeepSeek-V3.2": (78324, 0, 0),
    "DeepSeek-V4-Flash": (3915, 3219840, 12248064),
    "DeepSeek-V4-Pro": (5609.25, 4567680, 18772992),
    "Kimi-K2": (70272, 0, 0),
    "Kimi-K2.5": (70272, 0, 0),
    "Kimi-Linear-48B-A3B": (8064, 0, 43417600),
    "Kimi-K3": (27648, 0, 449372160),
    "MiniMax-Text-01": (40960, 0, 146800640),
    "MiniMax-M1-80k": (40960, 0, 146800640),
    "MiniMax-M2.5": (253952, 0, 0),
    "MiniMax-M3": (137472, 0, 0),
    "Jamba-1.5-mini": (16384, 0, 8716288),
    "Bamba-9B": (12288, 0, 62287360),
    "Nemotron-H-8B": (16384, 0, 102137856),
    "Nemotron-3-Nano-30B-A3B": (6144, 0, 49082368),
    "Nemotron-3-Super-120B-A12B": (8192, 0, 170229760),
    "Nemotron-3-Ultra-550B-A55B": (12288, 0, 407961600),
    "Granite-4.0-h-small": (16384, 0, 77322240),
    "Falcon-H1-34B": (147456, 0, 153206784),
    "Zamba2-2.7B": (184320, 0, 37089792),
    "Zamba2-7B": (372736, 0, 77925888),
    "Mamba2-2.7B": (0, 0, 85950464),
    "Mamba-Codestral-7B": (0, 0, 138149888),
    "LFM2-1.2B": (12288, 0, 81920),
    "LFM2-8B-A1B": (12288, 0, 147456),
    "RWKV7-World-2.9B": (0, 0, 21626880),
    "Whisper-large-v3": (163840, 0, 245760000),
    "Phi-3-mini-4k": (0, 804913152, 0),
    "Phi-3-mini-128k": (393216, 0, 0),
    "Phi-4": (204800, 0, 0),
    "Phi-4-mini": (131072, 0, 0),
    "GLM-4.5": (376832, 0, 0),
    "GLM-4.5-Air": (188416, 0, 0),
    "GLM-4.6": (376832, 0, 0),
    "GLM-5": (100152, 0, 0),
    "GLM-5.1": (100152, 0, 0),
    "GLM-5.2": (92628, 0, 0),
    "Olmo-3-7B": (131072, 1610612736, 0),
    "Olmo-3-32B": (65536, 805306368, 0),
}


page_bytes = cache(Spec.page_bytes)  # the layers of a model are mostly alike


def figures(model: Model) -> tuple[float, int, int]:
    token, window, fixed = 0.0, 0, 0
    for layer in model.layers:
        match layer.spec:
            case CompressorState() as spec:
                # Kept in blocks of 4 tokens where windows overlap, of 8 elsewhere.
                block = 4 if spec.window == 8 else 8
                fixed += spec.window // block * page_bytes(spec, block)
            case SlidingAttention() | SlidingLatentAttention() as spec:
                window += page_bytes(spec, spec.window)
            case ChunkedAttention() as spec:
                window += page_bytes(spec, spec.chunk)
            case CrossAttention() as spec:
                fixed += page_bytes(spec, spec.source)
            case spec if spec.tokens_per_state is None:
                fixed += page_bytes(spec, 1)
            case spec:
                token += page_bytes(spec, 256) / 256
    return token, window, fixed


@each(FIGURES)
def test_a_request_takes_what_it_takes(name: str) -> None:
    assert figures(Model.load(name)) == FIGURES[name]


def test_the_figures_cover_the_catalogue() -> None:
    assert list(catalogue()) == list(FIGURES)
    assert len(catalogue()) == 65


@each(catalogue().values())
def test_an_entry_has_sources_and_nothing_to_assume(entry: CatalogueEntry) -> None:
    model = Model.load(entry.name)
    assert model == Model.load(entry.repo)
    assert model.warnings == ()
    assert entry.source
    assert model.source == "; ".join(entry.source)
    assert model.confidence in ("high", "medium")


def test_names_and_repositories_are_distinct() -> None:
    entries = catalogue().values()
    names = [name.lower() for entry in entries for name in {entry.name, entry.repo}]
    assert len(set(names)) == len(names)


def test_the_catalogue_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        catalogue()["mine"] = next(iter(catalogue().values()))  # type: ignore[index]


def test_the_file_holds_entries_and_nothing_else() -> None:
    text = (resources.files("kvatlas.models") / "catalogue.json").read_bytes()
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(
            json.dumps([json.loads(text)[0] | {"more": 1}]), type=list[CatalogueEntry]
        )
