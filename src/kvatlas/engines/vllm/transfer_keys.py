"""The keys of vLLM's `--kv-transfer-config`, and hints for keys that vLLM refuses."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

EXTRA = "kv_connector_extra_config"
"""The key whose value contains the connector's settings."""
TRANSFER_KEYS = (
    "kv_connector",
    "kv_connector_module_path",
    "kv_role",
    "kv_load_failure_policy",
    EXTRA,
    "engine_id",
    "kv_buffer_device",
    "kv_port",
    "enable_permute_local_kv",
)
"""The keys of vLLM 0.32, which refuses others."""


def unknown_transfer_key(transfer: Mapping[str, Any], settings: tuple[str, ...]) -> str:
    """Return why vLLM refuses `transfer`; an empty string if vLLM accepts all its keys.

    The result names the first unknown key. `settings` are the names of the connector's settings.

    >>> unknown_transfer_key({"kv_role": "kv_both", "secret_file": "s"}, ("secret_file",))
    "unknown key 'secret_file' in kv_transfer_config: put it into kv_connector_extra_config"
    """
    for key in map(str, transfer):
        if key in TRANSFER_KEYS:
            continue
        near = get_close_matches(key, (*TRANSFER_KEYS, *settings), 1)
        if key in settings:
            hint = f"put it into {EXTRA}"
        elif near and near[0] in settings:
            hint = f"did you mean {near[0]!r} in {EXTRA}?"
        elif near:
            hint = f"did you mean {near[0]!r}?"
        else:
            hint = f"the settings of the connector are keys of {EXTRA}"
        return f"unknown key {key!r} in kv_transfer_config: {hint}"
    return ""
