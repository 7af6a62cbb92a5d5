"""Record the parameters of every causal language model of transformers.

    python tools/record_parameters.py [MODEL_TYPE...]

Each architecture is built from its default config on the meta device, where tensors take no
memory. The file tests/models/parameters.json has one line for each architecture: its class, the
number of its parameters, and its config without the keys that change neither weights nor caches.
If model types are given, only their lines are replaced.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.architectures.build import default_config, model_types  # noqa: E402

FILE = ROOT / "tests" / "models" / "parameters.json"
_OMITTED = re.compile(
    r"_token_id$|token_id$|drop|eps$|epsilon|initializer|^id2label$|^label2id$|^transformers_version$"
    r"|^use_cache$|^rope_|^torchscript$|_coef$|^output_|^pretraining_tp$|^dtype$|^architectures$"
    r"|^generation|^_|^return_dict$|^chunk_size_feed|_act$|hidden_act|activation"
)


def recorded(model_type: str) -> dict[str, Any]:
    """Return the line of one architecture."""
    config = default_config(model_type)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    if model_type == "gemma3n":
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["gemma3n_text"]
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    values = json.loads(config.to_json_string(use_diff=False))
    return {"architecture": name, "parameters": parameters, "config": _reduced(values)}


def _reduced(values: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in values.items() if not _OMITTED.search(key)}
    return {
        key: _reduced(value) if isinstance(value, dict) else value
        for key, value in sorted(kept.items())
        if value is not None
    }


def main(*chosen: str) -> None:
    """Record all architectures, or replace the lines of those in `chosen`."""
    transformers.logging.set_verbosity_error()
    found = json.loads(FILE.read_text())["architectures"] if chosen else {}
    for model_type in chosen or model_types():
        print(model_type, flush=True)
        found[model_type] = recorded(model_type)
    lines = (f"{json.dumps(name)}:{_line(found[name])}" for name in sorted(found))
    version = json.dumps(transformers.__version__)
    body = ",\n".join(lines)
    FILE.write_text(f'{{"transformers":{version},"architectures":{{\n{body}\n}}}}\n')


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


if __name__ == "__main__":
    main(*sys.argv[1:])
