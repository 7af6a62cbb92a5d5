"""The demo explains a failure in one sentence. That it works is seen with `make demo-vllm`."""

from __future__ import annotations

import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from examples import vllm_pair

from tests.vllm.local_servers import served


class Refusing(BaseHTTPRequestHandler):
    """An engine whose read of a request has failed."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        said = b'{"error": {"message": "Internal server error"}}'
        self.send_response(500)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


def test_an_engine_that_does_not_start_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm_pair, "SERVER", "no_such_server")
    monkeypatch.setattr(vllm_pair, "make_model", lambda folder: folder)
    assert vllm_pair.main() == 1
    said = capsys.readouterr().out
    assert "The demo failed: the prefill engine ended with 1 while it started: " in said
    assert "No module named no_such_server" in said
    assert "Traceback" not in said


def test_a_request_that_fails_is_explained(tmp_path: Path) -> None:
    log = tmp_path / "decode.log"
    log.write_text("Traceback ...\nkvatlas.errors.AtlasError: The lease has expired.\nINFO: 500\n")
    with served(ThreadingHTTPServer(("127.0.0.1", 0), Refusing)) as url:
        process = subprocess.Popen([sys.executable, "-c", ""])
        port = int(url.rpartition(":")[2])
        engine = vllm_pair.Served("decode", process, port, log)
        with pytest.raises(vllm_pair.DemoError) as failure:
            engine.complete("w1 w2", 1)
        process.wait()
    assert str(failure.value) == (
        "the decode engine did not complete a prompt of 2 words (500 Internal Server Error: "
        '{"error": {"message": "Internal server error"}}); its last message is: '
        "AtlasError: The lease has expired."
    )
