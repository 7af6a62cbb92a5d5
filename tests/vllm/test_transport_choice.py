"""Which transport `auto` selects, and what doctor reports about an opened one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvatlas import AtlasError
from kvatlas.engines.vllm import ConnectorSettings, transport_choice
from kvatlas.engines.vllm.engine_pair import Verdict
from kvatlas.engines.vllm.transport_choice import TransportChoice, choose_transport
from kvatlas.engines.vllm.transport_finding import _opened
from kvatlas.errors import Code
from kvatlas.wire.transports import tcp

EVERYWHERE = "0.0.0.0"  # noqa: S104


def chosen(devices: list[str], given: dict[str, Any], *, on_gpu: bool = False) -> TransportChoice:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport_choice, "rdma_devices", lambda: devices)
        patch.setattr(transport_choice, "nixl_installed", lambda: True)
        patch.delenv("UCX_NET_DEVICES", raising=False)
        return choose_transport(ConnectorSettings.read(given), on_gpu=on_gpu)


def test_engines_of_one_host_share_memory_whatever_devices_there_are() -> None:
    for given in ({}, {"listen": "127.0.0.1", "ports": 7600}, {"listen": "localhost"}):
        assert chosen(["mlx5_0"], given).name == "shm"
        assert chosen([], given, on_gpu=True).name == "cuda"


def test_hosts_with_rdma_use_nixl_on_a_device_that_other_hosts_reach() -> None:
    found = chosen(["mlx5_0", "mlx5_1"], {"listen": "10.0.0.5"}, on_gpu=True)
    assert found[:2] == ("nixl", {"device": "mlx5_0:1", "kind": "VRAM"})
    assert chosen(["mlx5_0"], {"listen": "10.0.0.5"}).options == {"device": "mlx5_0:1"}


def test_hosts_without_rdma_use_tcp_at_the_address_of_the_engine() -> None:
    assert chosen([], {"listen": "10.0.0.5"})[:2] == ("tcp", {"host": "10.0.0.5"})
    in_container = {"listen": EVERYWHERE, "advertise": "10.0.0.7"}
    assert chosen([], in_container).options == {"host": "10.0.0.7"}
    with pytest.raises(AtlasError) as refused:
        chosen([], {"listen": "10.0.0.5"}, on_gpu=True)
    assert refused.value.code is Code.WRONG_DEVICE


def test_options_need_a_transport() -> None:
    with pytest.raises(AtlasError, match="transport_options"):
        ConnectorSettings.read({"transport_options": {"device": "eth0"}})
    settings = ConnectorSettings.read({"transport": "tcp", "transport_options": {"host": "::1"}})
    assert choose_transport(settings, on_gpu=False).applied_to(settings) == settings


@pytest.mark.parametrize(
    ("given", "verdict", "reason"),
    [
        ({}, "ok", "available"),
        ({"transport": "tcp"}, "ok", "available"),
        ({"transport": "tcp", "listen": "10.0.0.5"}, "no", "loopback only"),
        ({"transport": "shm", "listen": "10.0.0.5"}, "no", "loopback only"),
        ({"listen": "10.99.99.99"}, "no", "cannot listen"),
        ({"transport": "tcp", "transport_options": {"hosts": "::1"}}, "no", "options are host"),
        ({"transport": "tcp", "transport_options": {"host": "10.99.99.99"}}, "no", "listen"),
    ],
)
def test_doctor_opens_the_transport(given: dict[str, Any], verdict: Verdict, reason: str) -> None:
    settings = ConnectorSettings.read(given)
    found = _opened(choose_transport(settings, on_gpu=False), settings)
    assert found[0] == verdict
    assert reason in found[1]


def test_doctor_reports_what_peers_see(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"a secret of sixteen bytes or more")
    seen: dict[str, dict[str, Any]] = {
        "shm, this host only": {},
        "tcp at 127.0.0.2, encrypted, authenticated": {"secret_file": str(secret)},
        "tcp at 127.0.0.2, not encrypted, not authenticated": {"unprotected": True},
    }
    for expected, given in seen.items():
        options: dict[str, Any] = {"transport": "tcp", "listen": "10.0.0.5"} if given else {}
        settings = ConnectorSettings.read(options | given)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tcp, "is_loopback", lambda _: False)
            chosen = choose_transport(settings, on_gpu=False)
            if given:
                chosen = chosen._replace(options={"host": "127.0.0.2"})
            assert _opened(chosen, settings)[2] == expected
