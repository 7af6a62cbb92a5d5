"""The example for two hosts: what its script would run, and what its proxy passes on."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from examples.two_hosts.proxy import Engines, serve

from kvatlas.engines.vllm import ConnectorSettings, EngineArguments, diagnose
from tests.vllm.local_servers import served

HERE = Path(__file__).parents[2] / "examples" / "two_hosts"
SCRIPT = HERE / "serve.sh"
BASH = shutil.which("bash") or ""
needs_bash = pytest.mark.skipif(not BASH, reason="there is no bash")


def script(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [BASH, str(SCRIPT), *arguments],
        capture_output=True, text=True, timeout=60, env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_bash
def test_what_the_script_runs_is_what_engines_take(tmp_path: Path) -> None:
    for name in ("serve.sh", "local.sh"):
        subprocess.run([BASH, "-n", str(HERE / name)], check=True, timeout=20)
    run = tmp_path / "not" / "yet"  # the folder of the secret is made too
    settings = (HERE / "hosts.env").read_text().replace("/run/secrets", str(run))
    (tmp_path / "hosts.env").write_text(settings)
    there = {"HOSTS_ENV": str(tmp_path / "hosts.env"), "PYTHON": sys.executable}
    assert "Wrote" in script("secret", **there)
    assert (run / "kvatlas").stat().st_mode & 0o077 == 0
    ends = [script(role, "--dry-run", **there) for role in ("prefill", "decode")]
    made = [EngineArguments.of_command(line) for line in ends]
    for one in made:
        assert one.kv_transfer_config is not None
        ConnectorSettings.read(one.kv_transfer_config["kv_connector_extra_config"]).secret()
    found = diagnose(*made)
    assert found.ok, found.answer
    assert {f.what: f.prefill for f in found.findings}["ports"] == "7600-7601"
    proxy = shlex.split(script("proxy", "--dry-run", **there))
    assert proxy[2:] == [
        "--listen", "10.0.0.6:8000",
        "--prefill", "http://10.0.0.5:8100", "--decode", "http://10.0.0.6:8200",
    ]  # fmt: skip
    refused = subprocess.run([BASH, str(SCRIPT)], capture_output=True, text=True, timeout=20)
    assert refused.returncode == 2
    assert "serve.sh prefill" in refused.stderr


class FakeEngine(BaseHTTPRequestHandler):
    """Remembers what it is asked, and answers as engines do."""

    asked: list[tuple[str, dict[str, Any], str | None]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, body, self.headers.get("Authorization")))
        if body.get("prompt") == "unfit":
            self.send_response(400)
            said = b"that is refused"
        else:
            self.send_response(200)
            answer = {"kv_transfer_params": {"kvatlas": len(self.asked)}, "text": "answer"}
            said = json.dumps(answer).encode()
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(said)

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"well")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


def fake() -> tuple[ThreadingHTTPServer, list[Any]]:
    asked: list[Any] = []
    handler = type("Handler", (FakeEngine,), {"asked": asked})
    return ThreadingHTTPServer(("127.0.0.1", 0), handler), asked


def post(url: str, body: Any, **headers: str) -> Any:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, text, headers)  # noqa: S310
    with urllib.request.urlopen(request, timeout=20) as answer:  # noqa: S310
        return json.load(answer)


def test_a_prompt_goes_to_prefill_first_and_then_with_its_answer_to_decode() -> None:
    (prefill, first), (decode, second) = fake(), fake()
    with served(prefill) as before, served(decode) as after:
        engines = Engines([before], [after])
        with served(serve(("127.0.0.1", 0), engines)) as proxy:
            body = {"prompt": "words", "max_tokens": 9, "stream_options": {}, "min_tokens": 3}
            forged = body | {"kv_transfer_params": {"do_remote_prefill": True}}
            answer = post(f"{proxy}/v1/completions", forged, Authorization="Bearer x")
            assert answer["text"] == "answer"
            asked = {"prompt": "words", "max_tokens": 1}
            params = {"kv_transfer_params": {"do_remote_decode": True}}
            assert first == [("/v1/completions", asked | params, "Bearer x")]
            handed = body | {"kv_transfer_params": {"kvatlas": 1}}
            assert second == [("/v1/completions", handed, "Bearer x")]
            for several in ({"prompt": ["a", "b"]}, {"prompt": "a", "n": 2}):
                post(f"{proxy}/v1/completions", several)
                assert second[-1][1] == several
            assert len(first) == 1, "what is read once is not handed to several"
            with urllib.request.urlopen(f"{proxy}/health", timeout=20) as said:  # noqa: S310
                assert said.read() == b"well"
            with pytest.raises(urllib.error.HTTPError) as refusal:
                post(f"{proxy}/v1/completions", {"prompt": "unfit"})
            assert refusal.value.read() == b"that is refused"
            for wrong in (b"[1]", b"{"):
                with pytest.raises(urllib.error.HTTPError):
                    post(f"{proxy}/v1/completions", wrong)


def test_without_a_prefill_engine_the_decode_engine_computes() -> None:
    decode, asked = fake()
    with served(decode) as after:
        nobody = Engines(["http://127.0.0.1:9"], [after])
        with served(serve(("127.0.0.1", 0), nobody)) as proxy:
            assert post(f"{proxy}/v1/chat/completions", {"messages": []})["text"] == "answer"
            assert asked == [("/v1/chat/completions", {"messages": []}, None)]
    nothing = Engines(["http://127.0.0.1:9"], ["http://127.0.0.1:9"])
    with (
        served(serve(("127.0.0.1", 0), nothing)) as proxy,
        pytest.raises(urllib.error.HTTPError) as refusal,
    ):
        post(f"{proxy}/v1/completions", {"prompt": "words"})
    assert refusal.value.code == 502
