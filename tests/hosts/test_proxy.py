"""The example's proxy when the host of a prefill engine vanishes during a request."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hosts.namespaces import inside
from tests.hosts.networks import BridgedNetwork
from tests.hosts.sites import SLACK

PROXY = Path(__file__).parents[2] / "examples" / "two_hosts" / "proxy.py"
NOTICED = 11.0
"""Seconds after which the proxy gives up a host that has vanished."""
ENGINE = """
import sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Engine(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        print("asked", flush=True)
        if sys.argv[2] == "prefill":
            time.sleep(1000)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"text": "computed"}')
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *words):
        pass
ThreadingHTTPServer((sys.argv[1], 8000), Engine).serve_forever()
"""


@pytest.mark.parametrize("when", ["before a request", "during a request"])
def test_a_prompt_is_computed_when_the_prefill_host_vanishes(when: str) -> None:
    network = BridgedNetwork(2)
    first, second = network.address(0), network.address(1)
    try:
        prefill = subprocess.Popen(
            inside(network.hosts[0], sys.executable, "-c", ENGINE, first, "prefill"),
            stdout=subprocess.PIPE,
        )
        subprocess.Popen(inside(network.hosts[1], sys.executable, "-c", ENGINE, second, "decode"))
        proxy = [sys.executable, str(PROXY), "--listen", f"{second}:9000"]
        proxy += ["--prefill", f"http://{first}:8000", "--decode", f"http://{second}:8000"]
        subprocess.Popen(inside(network.hosts[1], *proxy))
        waiting = ["curl", "--silent", "--retry", "60", "--retry-delay", "1", "--retry-connrefused"]
        for address in (f"{first}:8000", f"{second}:9000"):
            told = inside(network.hosts[1], *waiting, f"http://{address}/health")
            subprocess.run(told, check=True, timeout=90)
        if when == "before a request":
            network.set_up(0, up=False)
        begun = time.monotonic()
        body = json.dumps({"prompt": "words"})
        asking = ["curl", "--silent", "--data", body, f"http://{second}:9000/v1/completions"]
        asked = subprocess.Popen(inside(network.hosts[1], *asking), stdout=subprocess.PIPE)
        if when == "during a request":
            assert prefill.stdout is not None
            assert prefill.stdout.readline() == b"asked\n"
            begun = time.monotonic()
            network.set_up(0, up=False)
        said, _ = asked.communicate(timeout=60)
        assert json.loads(said) == {"text": "computed"}
        assert time.monotonic() - begun < NOTICED + 2 * SLACK
    finally:
        network.close()
