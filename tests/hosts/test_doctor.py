"""`kvatlas doctor` on hosts: what it reports of transports that peers on another host would use."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.conftest import MakeSite
from tests.hosts.namespaces import inside
from tests.hosts.networks import DEVICE, BridgedNetwork, Network
from tests.hosts.sites import Way

SECRET = b"a secret of the tests of hosts"
CONNECTOR = {
    "kv_connector": "KVAtlasConnector", "kv_connector_module_path": "kvatlas.engines.vllm",
    "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
}  # fmt: skip


def findings(network: Network, folder: Path, *more: str, **extra: Any) -> dict[str, Any]:
    """What doctor finds on the second host, by the name of the finding."""
    (folder / "secret").write_bytes(SECRET)
    for host, name in enumerate(("prefill", "decode")):
        own = {
            "listen": network.address(host), "ports": 7600, "secret_file": str(folder / "secret"),
        }  # fmt: skip
        transfer = CONNECTOR | {"kv_connector_extra_config": own | extra}
        engine = {"model": "Qwen3-8B", "kv_transfer_config": transfer}
        (folder / f"{name}.json").write_text(json.dumps(engine))
    program = [sys.executable, "-m", "kvatlas", "doctor", "prefill.json", "decode.json", "--json"]
    done = subprocess.run(
        inside(network.hosts[1], *program, *more),
        capture_output=True, text=True, check=False, cwd=folder, timeout=60,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return {one["what"]: one for one in json.loads(done.stdout)["findings"]}


def test_auto_is_tcp_with_tls_at_the_address_of_the_host(place: MakeSite, tmp_path: Path) -> None:
    network = BridgedNetwork(2)
    site = place(network, Way("tcp", 1))
    (source,) = site.source()
    peer = source.endpoint.removeprefix("tcp://")
    found = findings(network, tmp_path, "--peer", peer)
    assert found["transport"]["decode"] == "auto (tcp)"
    assert found["transport"]["verdict"] == "ok"
    own = network.address(1)
    assert found["peers see"]["decode"] == f"tcp at {own}, encrypted, authenticated"
    assert (found["peer"]["verdict"], found["peer"]["prefill"]) == ("ok", own)
    network.set_up(0, up=False)
    assert findings(network, tmp_path, "--peer", peer)["peer"]["verdict"] == "no"
    network.set_up(0, up=True)


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
def test_nixl_on_ethernet_between_hosts_is_refused_with_the_reason(
    place: MakeSite, tmp_path: Path
) -> None:
    """The set-up that was documented once. On its default device, NIXL reaches no other host."""
    network = BridgedNetwork(2)
    place(network, Way("tcp", 1))
    for options, reason in (
        ({"device": DEVICE}, "over_tcp"),
        ({}, "open on loopback only"),
        ({"device": DEVICE, "over_tcp": True}, "does not authenticate peers"),
    ):
        found = findings(network, tmp_path, transport="nixl", transport_options=options)
        assert found["transport"]["verdict"] == "no"
        assert reason in found["transport"]["why"]
