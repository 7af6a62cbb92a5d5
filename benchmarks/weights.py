"""Weights: our count of every model's parameters beside the exact one, and its bytes.

    python -m benchmarks.weights                     every model of the catalogue
    python -m benchmarks.weights FOLDER CONFIG...    config.json files, or folders of them

The exact count is that of transformers' own model on the meta device, where no memory is
taken. A model of several parts is counted twice: its text alone, and whole with its tower.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.timing import show
from kvatlas.models import Weights, catalogue
from kvatlas.models.known_models import CatalogueEntry

# Configs in the words of checkpoints that came before transformers had the model.
_SAME_AS = {"kimi_k2": "deepseek_v3", "minimax_text_01": "minimax", "minimax_m1": "minimax"}
# Text models that no AutoModel makes: module, config, model.
_CLASSES = {
    "minimax_m3": ("minimax_m3_vl", "MiniMaxM3VLTextConfig", "MiniMaxM3VLForCausalLM"),
    "whisper": ("whisper", "WhisperConfig", "WhisperForConditionalGeneration"),
}
_UNKNOWN = "transformers has no such model"


def exact_parameters(config: Mapping[str, Any], *, whole: bool = False) -> int | None:
    """Parameters of transformers' model of a config, its text or the `whole`; None without one."""
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    values = _plain(config if whole else config.get("text_config", config))
    kind = values.pop("model_type", "")
    kind = _SAME_AS.get(kind, kind)
    if "attn_res_block_size" in values:  # Kimi-K3: its text is not what kimi_linear was
        return None
    try:
        if kind in _CLASSES:
            folder, config_class, model_class = _CLASSES[kind]
            place = f"transformers.models.{folder}"
            made = getattr(importlib.import_module(place), config_class)(**values)
            make = getattr(importlib.import_module(f"{place}.modeling_{folder}"), model_class)
        else:
            made = transformers.AutoConfig.for_model(kind, **values)
            auto = "AutoModelForImageTextToText" if whole else "AutoModelForCausalLM"
            make = getattr(transformers, auto).from_config
        with torch.device("meta"):
            model = make(made)
    except ValueError as error:
        if "Unrecognized" in str(error):
            return None
        raise
    return int(sum(parameter.numel() for parameter in model.parameters()))


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without its quantisation, and with patterns in transformers' words."""
    dropped = ("quantization_config", "auto_map", "architectures")
    values = {key: value for key, value in config.items() if key not in dropped}
    if "text_config" in values:
        values["text_config"] = _plain(values["text_config"])
    if values.get("model_type") == "zamba2" and "hybrid_layer_ids" in values:
        chosen, depth = values["hybrid_layer_ids"], values["num_hidden_layers"]
        kinds = ["hybrid" if index in chosen else "mamba" for index in range(depth)]
        values["layers_block_type"] = kinds
    if "attn_type_list" in values:
        words = ("linear_attention", "full_attention")
        values["layer_types"] = [words[mark] for mark in values["attn_type_list"]]
    if values.get("model_type") == "kimi_k2":
        values["model_type"] = "deepseek_v3"
    return values


def row(name: str, config: Mapping[str, Any], weights: Weights) -> list[str]:
    """One model's line of the table."""
    nested = "text_config" in config
    ours = weights.text_parameters if nested else weights.parameters
    exact, why = exact_parameters(config), ""
    shown = f"{exact:,}" if exact is not None else "-"
    if exact is None:
        why = weights.warnings[0] if weights.warnings else _UNKNOWN
    elif exact != ours:
        why = f"differs by {ours - exact:,}"
    tower = weights.parameters - weights.text_parameters if nested else 0
    if tower:
        whole = exact_parameters(config, whole=True)
        right = whole == weights.parameters
        tower_text = f"{tower:,}" + ("" if right else f" (exact {(whole or 0) - (exact or 0):,})")
    else:
        tower_text = "-"
    size = f"{weights.bytes / 1e9:,.1f} GB"
    return [name, f"{ours:,}", shown, tower_text, size, weights.source, why or "equal"]


def configs(paths: Iterable[str]) -> Iterator[tuple[str, Mapping[str, Any], Any]]:
    """Names, configs and what to load: of files, of folders, or of the catalogue."""
    files = [file for path in paths for file in _files(Path(path))]
    for file in files:
        yield file.stem.removesuffix("_config"), json.loads(file.read_bytes()), file
    entries: Iterable[CatalogueEntry] = [] if files else catalogue().values()
    for entry in entries:
        yield entry.name, entry.expanded(), entry


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(path.glob("*config.json"))
        return [file for file in found if not file.name.endswith("hf_quant_config.json")]
    return [path]


def main(*paths: str) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    rows = [row(name, config, Weights.load(source)) for name, config, source in configs(paths)]
    equal = sum(line[-1] == "equal" for line in rows)
    columns = ["model", "text", "exact", "tower", "bytes", "from", "difference"]
    show(f"Parameters: {equal} of {len(rows)} equal to transformers' own", columns, rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
