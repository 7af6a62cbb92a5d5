"""Tiny drafters with random weights and caches of their own, and the models they guess for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.vllm.models import CONFIGS, checkpoint

GUESSED = 2
"""Tokens that are guessed at a time."""
HIDDEN = 128


def with_eagle(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A Llama, and how vLLM has EAGLE guess its tokens, a layer over its last states."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaModel

    path = folder / "eagle"
    config = LlamaConfig(**CONFIGS["small_llama"][1], initializer_range=0.08)
    config.architectures = ["LlamaForCausalLM"]
    torch.manual_seed(11)
    layers = LlamaModel(config).state_dict()
    kept = {name: one for name, one in layers.items() if name.startswith("layers.")}
    del kept["layers.0.input_layernorm.weight"]  # EAGLE has none
    kept["fc.weight"] = torch.randn(HIDDEN, 2 * HIDDEN) * 0.08
    config.save_pretrained(path)
    save_file(kept, path / "model.safetensors", {"format": "pt"})
    guessing = {"method": "eagle", "model": str(path), "num_speculative_tokens": GUESSED}
    return checkpoint("llama", folder), guessing


def with_eagle_over_windows(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A Mistral, whose layers see windows, and EAGLE, which sees all tokens."""
    return checkpoint("mistral", folder), with_eagle(folder)[1]


def with_draft_model(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A Llama whose tokens a smaller one guesses by itself."""
    small = str(checkpoint("small_llama", folder))
    guessing = {"method": "draft_model", "model": small, "num_speculative_tokens": GUESSED}
    return checkpoint("llama", folder), guessing


def with_mtp(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A MiMo, which has a layer that predicts further tokens in its own checkpoint."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Model

    path = folder / "mimo"
    values = {key: one for key, one in CONFIGS["llama"][1].items() if key != "head_dim"}
    config = Qwen2Config(**values, initializer_range=0.08)
    torch.manual_seed(13)
    kept = Qwen2ForCausalLM(config).state_dict()
    further = Qwen2Model(Qwen2Config(**values | {"num_hidden_layers": 1}, initializer_range=0.08))
    own = "model.mtp_layers.0."
    for name, one in further.state_dict().items():
        if name.startswith("layers.0."):
            # So that its guesses depend on what it keeps, and not on the last token alone.
            much = 6.0 if "self_attn" in name else 1.0
            kept[own + name.removeprefix("layers.0.")] = much * one
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        kept[f"{own}{name}.weight"] = torch.ones(HIDDEN)
    kept[own + "input_proj.weight"] = torch.randn(HIDDEN, 2 * HIDDEN) * 0.08
    config.save_pretrained(path)
    save_file(kept, path / "model.safetensors", {"format": "pt"})
    described = json.loads((path / "config.json").read_text())
    described |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(described))
    return path, {"method": "mtp", "num_speculative_tokens": 1}
