"""The stable core works without extras, and imports no other package of kvatlas."""

from __future__ import annotations

import json
import subprocess
import sys

CORE = {"errors", "geometry", "specs", "models", "planning", "routing"}
USE = """
import json, sys
import kvatlas
from kvatlas import errors, geometry, specs, models, planning, routing

source = planning.plan("Qwen3.5-397B-A17B", memory="20GiB", tp=2)
copied = planning.Plan.from_json(source.to_json())
destination = planning.plan("Qwen3.5-397B-A17B", memory="20GiB", tp=4, layout="BHLNC")
way = routing.route(copied, destination)
blocks = {
    f"{end}_blocks": {number: [1 + number] for number in range(len(plan.groups))}
    for end, plan in (("source", copied), ("destination", destination))
}
bound = way.bind(source_rank=0, destination_rank=1, tokens=1, **blocks)
print(json.dumps([bound.nbytes, sorted(sys.modules)]))
"""


def test_plans_and_routes_are_made_without_any_other_package() -> None:
    done = subprocess.run([sys.executable, "-c", USE], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    nbytes, loaded = json.loads(done.stdout)
    assert nbytes > 0
    ours = {name.split(".")[1] for name in loaded if name.startswith("kvatlas.")}
    assert ours == CORE
    others = {"torch", "triton", "transformers", "zmq", "cryptography", "typer", "rich"}
    assert not others & set(loaded)
