"""Record what transformers caches for each architecture, in tests/architectures/recorded.json.

`make record-architectures` runs it, with the newest transformers that is supported. The recording
contains the keys of each default config that may matter, the number of parameters, and the shapes
of the caches of each layer, run-length encoded.
"""

from __future__ import annotations

import json
import re
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import transformers
from tests.architectures.build import Built, build, model_types

OUT = Path(__file__).parents[1] / "tests" / "architectures" / "recorded.json"

_DROPPED = re.compile(
    r"token|rope|label|eps|init|dropout|drop|bias|return_|output_|transformers_|problem|_act|prun"
    r"|vision_config|audio_config|torch|chunk_size_feed|_name_or_path|task_|theta|temperature|loss"
)


def entry(built: Built) -> dict[str, Any]:
    """Return the recording of one architecture."""
    layers = [[layer.tensors, layer.window] for layer in built.layers]
    return {
        "architecture": built.architecture,
        "parameters": built.parameters,
        "config": _reduced(json.loads(json.dumps(built.config, default=str))),
        "layers": [[len(list(same)), *one] for one, same in groupby(layers)],
    }


def _reduced(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if _DROPPED.search(key) or value is None:
            continue
        if isinstance(value, dict):
            value = _reduced(value)
        elif isinstance(value, list) and len(value) > 8:
            value = {"runs": [[one, len(list(same))] for one, same in groupby(value)]}
        found[key] = value
    return found


def main() -> None:
    """Record all architectures, or those that are named."""
    names = sys.argv[1:] or model_types()
    recorded = json.loads(OUT.read_text())["architectures"] if sys.argv[1:] else {}
    for name in names:
        recorded[name] = entry(build(name))
    write(recorded)
    print(f"{len(recorded)} architectures, transformers {transformers.__version__}: {OUT.name}")


def write(recorded: dict[str, Any]) -> None:
    """Write the recording with one line for each architecture."""
    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(recorded[k])}" for k in sorted(recorded))
    head = f'{{"transformers": "{transformers.__version__}", "architectures": {{\n'
    OUT.write_text(head + lines + "\n}}\n")


if __name__ == "__main__":
    main()
