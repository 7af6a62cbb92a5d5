"""Settings from vLLM's extra config, and versions of vLLM."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas import AtlasError
from kvatlas.engines.vllm import ConnectorSettings
from kvatlas.engines.vllm.supported_versions import METHODS, check_version
from kvatlas.errors import Code

EVERYWHERE = "0.0.0.0"  # noqa: S104


def test_settings_that_cannot_be_are_refused_with_what_to_do() -> None:
    for given, hint in (
        ({"lease_second": 3}, "lease_seconds"),
        ({"quite": 3}, "Valid keys: transport"),
        ({"transport": "pigeon"}, "nixl"),
        ({"lease_seconds": 0}, "docs/how-to/vllm.md"),
        ({"ports": "many"}, "docs/how-to/vllm.md"),
        ({"how": "quickly"}, "Choose one of auto, direct"),
        ({"how": "landed"}, "'landed' is now called 'coalesced'"),
        ({"listen": EVERYWHERE}, "advertise"),
        ({"tier": "memcached://host"}, "mooncake://host:port"),
        ({"tier": "host://"}, "mooncake://host:port"),
        ({"tier": "/a/file", "tenant": "me"}, "Set tier to the address of a store"),
        ({"tier": "folder:///mnt/kv", "tier_options": {"stage": 2}}, "docs/how-to/vllm.md"),
    ):
        with pytest.raises(AtlasError) as refusal:
            ConnectorSettings.read(given)
        assert refusal.value.code is Code.BAD_CONFIG
        assert hint in refusal.value.hint


def test_ranks_listen_and_are_told_of_where_settings_say() -> None:
    made = ConnectorSettings.read({"listen": EVERYWHERE, "advertise": "pod-3", "ports": 5000})
    assert made.listen_at(3) == "tcp://0.0.0.0:5003"
    assert made.advertised("tcp://0.0.0.0:5003") == "tcp://pod-3:5003"
    assert ConnectorSettings.read(None).listen_at(3) == "tcp://127.0.0.1:0"
    six = ConnectorSettings.read({"listen": "::1"})
    assert six.advertised("tcp://[::1]:7") == "tcp://[::1]:7"
    with pytest.raises(AtlasError):
        ConnectorSettings.read({"ports": 65535}).listen_at(1)


def test_a_secret_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"sixteen bytes or more\n")
    assert ConnectorSettings.read({"secret_file": str(path)}).secret() == b"sixteen bytes or more"
    assert ConnectorSettings().secret() is None
    with pytest.raises(AtlasError) as refusal:
        ConnectorSettings.read({"secret_file": str(tmp_path / "gone")}).secret()
    assert "gone" in str(refusal.value)


def test_versions_that_nobody_has_run_are_warned_of_and_lacking_ones_refused() -> None:
    whole: dict[str, Any] = dict.fromkeys(METHODS)
    check_version("0.32.0+cpu", type("Base", (), whole))
    check_version("0.33.0rc1", type("Base", (), whole))
    with pytest.warns(UserWarning, match=r"vLLM 0\.34"):
        check_version("0.34.0rc1", type("Base", (), whole))
    for name in METHODS:
        lacking = type("Base", (), {key: None for key in METHODS if key != name})
        with pytest.raises(AtlasError, match=name):
            check_version("0.32.0", lacking)


def test_every_setting_is_documented_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/vllm.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \| .* \|$", page, re.MULTILINE)
    fields = msgspec.structs.fields(ConnectorSettings)
    defaults = msgspec.to_builtins(ConnectorSettings())
    assert [name for name, _ in rows] == [field.name for field in fields]
    assert {name: json.loads(text) for name, text in rows} == defaults


def test_an_old_vllm_is_refused_when_the_connector_is_imported() -> None:
    """It lacks names before it lacks methods; in a process that has not imported the real one."""
    code = """if True:
        import sys
        from types import ModuleType
        from kvatlas import AtlasError
        import kvatlas.engines.vllm as engine
        for parts in range(1, 6):
            path = ".".join(["vllm", "distributed", "kv_transfer", "kv_connector", "v1"][:parts])
            sys.modules[path] = ModuleType(path)
            sys.modules[path].__path__ = []
        sys.modules["vllm"].__version__ = "0.9.0"
        try:
            engine.KVAtlasConnector
        except AtlasError as refusal:
            print(refusal)
    """
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert "lacks a name" in said
    assert "vllm.distributed.kv_transfer.kv_connector.factory" in said
