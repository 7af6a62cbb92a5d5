"""The files in deploy/: what they name exists, and their engines can exchange caches."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvatlas.engines.vllm import EngineArguments, diagnose
from kvatlas.engines.vllm.exported_counters import COUNTERS
from kvatlas.engines.vllm.tier_worker import TierCounts
from kvatlas.engines.vllm.worker_side import PullCounts

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
BASE = ROOT / "deploy" / "kubernetes" / "base"
MONITORING = ROOT / "deploy" / "monitoring"
PAGE = ROOT / "docs" / "how-to" / "deployment.md"
METRIC = re.compile(r"vllm:kvatlas_(\w+)")
SIZE = re.compile(
    r"^\| ([\w.-]+)[^|]*\| ([\d,]+) \| ([\d.]+) s \| ([\d.]+) s \| ([\d.]+) s \|$", re.M
)
ADDRESSES = {"prefill": "10.0.0.5", "decode": "10.0.0.6"}


def manifests() -> dict[tuple[str, str], Any]:
    """All resources of the base, by kind and name."""
    found = [one for path in resources() for one in yaml.safe_load_all(path.read_text())]
    named = {(one["kind"], one["metadata"]["name"]): one for one in found}
    assert len(named) == len(found)
    return named


def resources() -> list[Path]:
    names = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    return [BASE / name for name in names]


def test_every_counter_is_exported() -> None:
    counted = [one.name for kind in (PullCounts, TierCounts) for one in fields(kind)]
    assert sorted(counted) == sorted(COUNTERS)


@pytest.mark.parametrize("name", ["alerts.yaml", "dashboard.json"])
def test_every_metric_that_is_named_is_exported(name: str) -> None:
    named = set(METRIC.findall((MONITORING / name).read_text())) - {""}
    assert named
    assert named <= {f"{counter}_total" for counter in COUNTERS}
    if name == "dashboard.json":
        assert named == {f"{counter}_total" for counter in COUNTERS}, "a counter is not shown"


def test_alerts_and_panels_are_complete() -> None:
    (group,) = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}, rule
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert set(rule["annotations"]) == {"summary", "action"}
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["targets"] for panel in panels)


def test_the_base_lists_its_files_and_selectors_find_pods() -> None:
    assert sorted(resources()) == sorted(set(BASE.glob("*.yaml")) - {BASE / "kustomization.yaml"})
    found = manifests()
    pods = {
        name: one["spec"]["template"] for (kind, name), one in found.items() if kind == "Deployment"
    }
    assert set(pods) == {"prefill", "decode", "proxy"}
    for (kind, name), one in found.items():
        spec = one["spec"]
        selected = spec.get("podSelector") or spec.get("selector") or {}
        labels = selected.get("matchLabels", selected).items()
        chosen = [
            pod for pod, about in pods.items() if labels <= about["metadata"]["labels"].items()
        ]
        assert chosen, (kind, name)
        if kind == "Service":
            (pod,) = chosen
            (container,) = pods[pod]["spec"]["containers"]
            ports = {port["name"] for port in container["ports"]}
            assert {port["targetPort"] for port in spec["ports"]} <= ports
    images = {pod["spec"]["containers"][0]["image"] for pod in pods.values()}
    kustomization = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    assert images == {one["name"] for one in kustomization["images"]}
    urls = {word for word in pods["proxy"]["spec"]["containers"][0]["args"] if "http://" in word}
    services = {name for kind, name in found if kind == "Service"}
    assert {re.split(r"[/:]+", url)[1] for url in urls} <= services


def test_the_engines_of_the_base_can_exchange_caches() -> None:
    engines = []
    for role, address in ADDRESSES.items():
        template = manifests()["Deployment", role]["spec"]["template"]
        (container,) = template["spec"]["containers"]
        words = [*container["command"], *container["args"]]
        line = " ".join(f"'{word.replace('$(POD_IP)', address)}'" for word in words)
        made = EngineArguments.of_command(line)
        engines.append(made)
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        assert gpus == made.tensor_parallel_size
        assert made.kv_transfer_config is not None
        extra = made.kv_transfer_config["kv_connector_extra_config"]
        assert extra["listen"] == address
        (mounted,) = [one for one in container["volumeMounts"] if one["name"] == "secret"]
        assert extra["secret_file"] == f"{mounted['mountPath']}/secret"
    found = diagnose(*engines)
    assert found.ok, found.answer
    policy = manifests()["NetworkPolicy", "engines"]["spec"]["ingress"][0]["ports"][0]
    ports = {one.what: one for one in found.findings}["ports"]
    admitted = range(policy["port"], policy["endPort"] + 1)
    assert all(
        int(port) in admitted for said in (ports.prefill, ports.decode) for port in said.split("-")
    )


def test_the_table_of_sizes_is_what_doctor_computes() -> None:
    rows = SIZE.findall(PAGE.read_text())
    assert len(rows) == 5
    for model, shown, *seconds in rows:
        engine = EngineArguments.of_changes(model, "tp=8")
        moves = diagnose(engine, engine, tokens=8192).moves
        assert moves is not None
        assert f"{moves.nbytes:,}" == shown
        for rate, said in zip((25, 100, 400), seconds, strict=True):
            exact = moves.nbytes * 8 / (rate * 1e9)
            assert abs(float(said) - exact) < (0.006 if rate == 25 else 0.0006), (model, rate)
