"""Towers: the vision or audio encoders of multimodal models.

A tower embeds patches, runs a stack of attention and MLP blocks, and projects the result to
the text model's hidden size. Towers are never quantised. A tower that is not in the table is
not counted, and a warning reports that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvatlas.models.config import Config
from kvatlas.models.weights.family_layers import listener
from kvatlas.models.weights.tensor import Tensor, linear, norm


def blocks(
    depth: int, hidden: int, width: int, *, heads: int, bias: bool = True, gated: bool = False,
    norms: int = 2, head_norms: int = 0,
) -> list[Tensor]:  # fmt: skip
    """Return the weights of a vision transformer with `depth` blocks of equal shape."""
    return [
        *linear("tower", "attn", 4 * hidden, hidden, parts=heads, copies=depth, bias=bias),
        *linear("tower", "up", width * (1 + gated), hidden, parts=heads, copies=depth, bias=bias),
        *linear("tower", "down", hidden, width, parts=heads, copies=depth, bias=bias),
        Tensor("tower", "norms", norms * hidden * (1 + bias) + head_norms, copies=depth),
    ]


def qwen(vision: Config, hidden: int) -> list[Tensor]:
    """Return the weights of Qwen's tower: patch and position embeddings, blocks and mergers."""
    own, out = vision.hidden(), vision.count("out_hidden_size", default=hidden)
    patch = vision.count("patch_size") ** 2 * vision.count("temporal_patch_size", default=2)
    merged = own * vision.count("spatial_merge_size", default=2) ** 2
    deep = len(vision.listing("deepstack_visual_indexes") or ())
    merge = [
        *linear("tower", "merger.linear_fc1", merged, merged, copies=1 + deep, bias=True),
        *linear("tower", "merger.linear_fc2", out, merged, copies=1 + deep, bias=True),
        Tensor("tower", "merger.norm", own + deep * merged, 2),
    ]
    return [
        *linear(
            "tower", "patch_embed", own, vision.count("in_channels", default=3) * patch, bias=True
        ),
        Tensor("tower", "pos_embed", vision.count("num_position_embeddings"), own),
        *_blocks(vision, vision.count("num_heads")),
        *merge,
    ]


def _blocks(vision: Config, heads: int, **options: Any) -> list[Tensor]:
    depth, width = vision.count("depth", "num_hidden_layers"), vision.count("intermediate_size")
    return blocks(depth, vision.hidden(), width, heads=heads, **options)


def siglip(vision: Config, hidden: int) -> list[Tensor]:
    """Return the weights of SigLIP with its pooling head, and of Gemma-3's projection."""
    own, width = vision.hidden(), vision.count("intermediate_size")
    patch, heads = vision.count("patch_size"), vision.count("num_attention_heads")
    pooled = [*blocks(1, own, width, heads=heads, norms=1), Tensor("tower", "head.probe", own)]
    return [
        *linear("tower", "patch_embedding", own, 3 * patch**2, bias=True),
        Tensor("tower", "position_embedding", (vision.count("image_size") // patch) ** 2, own),
        *_blocks(vision, heads),
        norm("post_layernorm", own, bias=True)._replace(kind="tower"),
        *pooled,
        Tensor("tower", "mm_input_projection", own, hidden),
        Tensor("tower", "mm_soft_emb_norm", own),
    ]


def gemma4(vision: Config, hidden: int) -> list[Tensor]:
    """Return the weights of Gemma-4's tower, whose blocks have gated MLPs and four norms."""
    own, heads = vision.hidden(), vision.count("num_attention_heads")
    head_dim = vision.count("head_dim", default=own // heads)
    return [
        Tensor(
            "tower", "position_embedding_table", 2 * vision.count("position_embedding_size"), own
        ),
        *linear("tower", "input_proj", own, 3 * vision.count("patch_size") ** 2),
        *_blocks(vision, heads, bias=False, gated=True, norms=4, head_norms=2 * head_dim),
        *linear("tower", "embed_vision.embedding_projection", hidden, own),
    ]


def kimi(vision: Config, hidden: int) -> list[Tensor]:
    """Return the weights of MoonViT, whose projection merges four patches into one row."""
    own, width = vision.count("vt_hidden_size"), vision.count("vt_intermediate_size")
    grid = vision.count("init_pos_emb_height") * vision.count("init_pos_emb_width")
    merged, patch = 4 * own, vision.count("patch_size")
    return [
        *linear("tower", "patch_embed", own, 3 * patch**2, bias=True),
        Tensor("tower", "pos_emb", grid, own),
        *blocks(
            vision.count("vt_num_hidden_layers"), own, width,
            heads=vision.count("vt_num_attention_heads"),
        ),
        norm("final_layernorm, pre_norm", 2 * own, bias=True)._replace(kind="tower"),
        *linear("tower", "mm_projector.in_proj", merged, merged, bias=True),
        *linear("tower", "mm_projector.out_proj", hidden, merged, bias=True),
    ]  # fmt: skip


def llama4(vision: Config, hidden: int) -> list[Tensor]:
    """Return the weights of Llama 4's tower, including its pixel-shuffle adapter."""
    own, patch = vision.hidden(), vision.count("patch_size")
    wide = vision.count("projector_input_dim")
    out = vision.count("projector_output_dim")
    tokens = (vision.count("image_size") // patch) ** 2 + 1
    shuffled = vision.count("intermediate_size")
    return [
        Tensor("tower", "class_embedding, positional_embedding", tokens + 1, own),
        *linear("tower", "patch_embedding", own, 3 * patch**2),
        norm("layernorm_pre, layernorm_post", 2 * own, bias=True)._replace(kind="tower"),
        *_blocks(vision, vision.count("num_attention_heads")),
        *linear("tower", "vision_adapter.fc1", wide, shuffled),
        *linear("tower", "vision_adapter.fc2", out, wide),
        *linear("tower", "multi_modal_projector", hidden, vision.count("vision_output_dim")),
    ]


def whisper(config: Config, hidden: int, architecture: str) -> list[Tensor]:
    """Return the weights of Whisper's encoder and of the decoder's position embeddings."""
    if architecture == "WhisperForCausalLM":  # the decoder alone
        rows = config.count("max_target_positions")
        return [Tensor("embedding", "embed_positions", rows, hidden)]
    layers, width = config.count("encoder_layers"), config.count("encoder_ffn_dim")
    heads = config.count("encoder_attention_heads")
    each = [
        *listener(config, heads=heads, head_dim=hidden // heads),
        *linear("tower", "fc1", width, hidden, parts=heads, bias=True),
        *linear("tower", "fc2", hidden, width, parts=heads, bias=True),
        norm("norms", 2 * hidden, bias=True),
    ]
    convs = hidden * 3 * (config.count("num_mel_bins") + hidden) + 2 * hidden
    positions = config.count("max_source_positions") + config.count("max_target_positions")
    return [
        *(tensor._replace(kind="tower", copies=layers) for tensor in each),
        Tensor("tower", "conv1, conv2", convs),
        Tensor("tower", "embed_positions", positions, hidden),
        norm("layer_norm", hidden, bias=True)._replace(kind="tower"),
    ]


_TOWERS: dict[str, Callable[[Config, int], list[Tensor]]] = {
    "qwen3_vl": qwen,
    "qwen3_vl_moe": qwen,
    "qwen3_5": qwen,
    "qwen3_5_moe": qwen,
    "gemma3": siglip,
    "gemma4": gemma4,
    "kimi_k25": kimi,
    "llama4": llama4,
}


def tower(root: Config, text: Config, architecture: str, warnings: list[str]) -> list[Tensor]:
    """Return the weights of a model's tower; empty if the model has no tower of a known kind."""
    model_type = root.text("model_type") or ""
    if model_type == "whisper":
        return whisper(root, text.hidden(), architecture)
    if model_type == "fuyu":
        pixels = root.count("patch_size") ** 2 * root.count("num_channels", default=3)
        return linear("tower", "vision_embed_tokens", text.hidden(), pixels, bias=True)
    made: list[Tensor] = []
    vision = root.section("vision_config")
    if vision is not None and model_type in _TOWERS:
        made = _TOWERS[model_type](vision, text.hidden())
    elif vision is not None:
        warnings.append(f"the vision tower of {model_type or 'this model'} is not counted")
    if root.section("audio_config") is not None:
        warnings.append(f"the audio tower of {model_type or 'this model'} is not counted")
    return made
