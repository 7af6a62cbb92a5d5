"""Config keys that may change the caches, although no reader has read them.

Models gain new settings with every release. A key whose name contains a word such as `head` or
`window` may change what a layer caches. If no reader has read such a key, a warning reports it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from kvatlas.models.config import Config

_MAY_CHANGE = (
    r"(^|_)kv_|_kv(_|$)|head|window|layer_types|index|conv|state"
    r"|query_group|num_groups$|gqa|multi_query|(^|_)(local|global)_|att(entio)?n_layers"
    r"|(^|_)(cla|recurrent|sink|value_dim)(_|$)|cross_(decoder_)?layers|compress_rat|memory_tokens"
)

# These keys change computations, weights, training or inputs, but not the caches.
_HARMLESS = (
    r"^(lm_head|tie_|use_lm_head|output_hidden_states|initializer|head_wise|headwise|softmax|"
    r"rope|rotary|partial_rotary|mrope|query_pre_attn|use_head|attn_head_scale|heads_per_ngram|"
    r"indexer_rope|index_n_heads|index_topk|index_share|index_local|index_block|index_init|"
    r"index_score|indexer_types|index_skip|swa_num_attention_heads|mlp_layer_types|"
    r"mtp_.*layer_types|num_attention_heads|num_sliding_attention_heads|multimodal|is_encoder_"
    r"|num_nextn|classifier|encoder_.*|num_encoder_.*|moe_.*|keep_window_size|vision_.*|audio_.*|head_act|hidden_states|attn_window_mask"
    r"|cross_attention_hidden|ignore_index)"
    r"|token_ind(ex|ices)|_token_id|drop|bias|(^|_)norm|_norm(_|$)|image|video|patch|pooling"
    r"|head_type|ffn|experts?(_|$)|lm_head|conv_act|conv_use|head_scale|logit|deepstack"
    r"|num_attention_heads_per_layer|first_layer_fusion|mhc|gate|checkpoint|intermediate"
)
_NO_CACHE = (
    r"quant|rope|compression_config|task_specific|generation|auto_map|id2label|depth_decoder"
)
"""Sections whose keys never change the caches, or are read elsewhere."""

_DEEPEST = 3


def may_change_caches(key: str) -> bool:
    """Return whether a config key of this name may change what a layer caches.

    >>> may_change_caches("num_global_key_value_heads"), may_change_caches("hidden_act")
    (True, False)
    """
    return bool(re.search(_MAY_CHANGE, key)) and not re.search(_HARMLESS, key)


def unread_warnings(config: Config) -> list[str]:
    """Return a warning for each key that may change the caches and was not read.

    Keys of nested sections count if no reader has read the section.
    """
    return [
        f"{key} was not read, and may change the caches: {_short(value)}"
        for name in config.unread_keys()
        if not re.search(_HARMLESS, name)
        for key, value in _suspects(name, config.get(name))
    ]


def outer_warnings(root: Config, text: Config) -> list[str]:
    """Return a warning for each key outside the text config that may change the caches.

    Readers use only the text config. A key that the text config has too causes no warning.
    """
    return [
        f"{key} outside the text config was not read, and may change the caches: {_short(value)}"
        for key in root.filled_keys()
        if may_change_caches(key) and not text.has(key)
        if not isinstance(value := root.get(key), Mapping)
    ]


def _suspects(name: str, value: object, depth: int = 0) -> Iterator[tuple[str, object]]:
    """Yield the path and value of each key that may change the caches, from the outside in."""
    key = name.rpartition(".")[2]
    if may_change_caches(key):
        yield name, value
    elif depth < _DEEPEST and not re.search(_HARMLESS, key) and not re.search(_NO_CACHE, key):
        parts = value if isinstance(value, list | tuple) else [value]
        inner = (part for part in parts if isinstance(part, Mapping))
        for name_of, held in next(inner, {}).items():
            yield from _suspects(f"{name}.{name_of}", held, depth + 1)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
