"""Startup logs of vLLM, as quoted in public threads, next to the budget's prediction.

    python -m tests.planning.startup_logs

prints the table. Logs that calibrated a constant are marked; the others were held out. Settings
that a thread does not quote are the defaults of the release.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvatlas.models import Weights, find_gpu
from kvatlas.planning.given_sizes import Topology
from kvatlas.planning.memory_budget import GIB, Budget, EngineLoad, gpu_budget

ALLOWED = 0.1
"""The greatest error that counts as a hit, as a share of the memory for caches."""
_ALL: list[dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())
LOGS = [log for log in _ALL if "skipped" not in log]
SKIPPED = {log["source"]: log["skipped"] for log in _ALL if "skipped" in log}
"""Logs that were found and are not predicted, with the reason."""


def predicted(log: dict[str, Any]) -> Budget:
    gpu = find_gpu(log["gpu"])
    names = ("batched_tokens", "sequences", "release")
    load = EngineLoad.default(gpu, **{name: log.get(name) for name in names})
    weights = Weights.load(log.get("config", log["model"]), dtype=log.get("weights_dtype"))
    return gpu_budget(
        weights,
        gpu._replace(memory=int(log["gib"] * GIB)),
        Topology(tp=log.get("tp", 1), pp=log.get("pp", 1), ep=log.get("ep", 1)),
        load=load,
        utilization=log["utilization"],
        experts_per_token=log.get("experts"),
    )


def error(log: dict[str, Any]) -> float:
    """The difference between prediction and log, as a share of the log's KV memory."""
    measured = float(log["kv"])
    return (predicted(log).kv / GIB - measured) / abs(measured)


def main() -> None:
    print("| log | model | GPUs | use | log, GiB | predicted, GiB | error | |")
    print("|---|---|---|---|---|---|---|---|")
    for log in LOGS:
        use = "calibration" if log.get("calibration") else "held out"
        gpus = f"{log.get('tp', 1) * log.get('pp', 1)} x {log['gpu']}"
        kv, wrong = predicted(log).kv / GIB, error(log)
        row = (log["source"], log["model"], gpus, use, f"{log['kv']:.2f}", f"{kv:.2f}")
        print("|", " | ".join(row), f"| {wrong:+.1%} | {'miss' if abs(wrong) > ALLOWED else ''} |")
    held = [log for log in LOGS if not log.get("calibration")]
    hits = sum(abs(error(log)) <= ALLOWED for log in held)
    print(f"\n{hits} of {len(held)} held-out logs within {ALLOWED:.0%}.")
    print(
        *(f"{log['source']} {log['model']}: {log['note']}" for log in LOGS if "note" in log),
        sep="\n",
    )
    print("\nNot predicted:")
    print(*(f"{source} {reason}" for source, reason in SKIPPED.items()), sep="\n")


if __name__ == "__main__":
    main()
