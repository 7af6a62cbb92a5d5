"""Proxies between two real engines: what the one answers reaches the other as JSON, over HTTP."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from examples.two_hosts.proxy import Engines
from examples.two_hosts.proxy import serve as serve_proxy

from tests.vllm.comparing import Undisturbed, assert_nothing_held, assert_same, atlas, prompt
from tests.vllm.engine_process import Answer, Engine, engine
from tests.vllm.local_servers import served
from tests.vllm.models import checkpoint

COMPLETIONS = "/v1/completions"
NOBODY_YET = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What proxies for vLLM's own connector ask a prefill engine: every field is there."""

Ask = Callable[[str, str, dict[str, Any]], Any]
"""Has a prompt prefilled at one address and decoded at another."""


def front_of(asked: Engine) -> HTTPServer:
    """A server before an engine, which takes and gives what vLLM's own does for completions."""

    class Front(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            params, tokens = body.get("kv_transfer_params"), body["max_tokens"]
            got = asked.generate(body["prompt"], tokens=tokens, params=params)
            choice = {"tokens": got.tokens, "logprobs": got.logprobs, "reason": got.reason}
            named = bool((params or {}).get("do_remote_prefill"))
            said = {"choices": [choice], "kv_transfer_params": got.params, "named": named}
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(said).encode())

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    return HTTPServer(("127.0.0.1", 0), Front)


def post(url: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode())  # noqa: S310
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
        found: bytes = answer.read()
    return found


def with_all_fields(prefill: str, decode: str, body: dict[str, Any]) -> Any:
    """As vLLM's toy proxy: every field named, and the answer's handed on as they are."""
    asked = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": NOBODY_YET}
    params = json.loads(post(prefill + COMPLETIONS, asked))["kv_transfer_params"]
    return json.loads(post(decode + COMPLETIONS, body | {"kv_transfer_params": params}))


def with_numbers_as_doubles(prefill: str, decode: str, body: dict[str, Any]) -> Any:
    """As a sidecar in a language whose JSON has doubles and sorts keys, and that adds its own."""

    def number(text: str) -> int:
        exact = float(text)
        assert exact == int(text), "more digits than a double has"
        return int(exact)

    asked = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": NOBODY_YET}
    said = json.loads(post(prefill + COMPLETIONS, asked), parse_int=number)
    params = json.loads(json.dumps(said["kv_transfer_params"], sort_keys=True))
    params |= {"remote_host": "10.0.0.9", "remote_port": 5600}
    return json.loads(post(decode + COMPLETIONS, body | {"kv_transfer_params": params}))


def by_the_example(prefill: str, decode: str, body: dict[str, Any]) -> Any:
    """By the proxy that `examples/two_hosts` runs."""
    proxy = serve_proxy(("127.0.0.1", 0), Engines([prefill], [decode]))
    with served(proxy) as at:
        return json.loads(post(at + COMPLETIONS, body))


@pytest.fixture(scope="module")
def pair(checkpoints: Path) -> Iterator[tuple[Engine, Engine]]:
    """A prefill and a decode engine of unlike blocks, whose layers have windows."""
    model = checkpoint("gemma3", checkpoints)
    with (
        engine(model, name="prefill", core="0", connector=atlas(), block_size=64) as prefill,
        engine(model, name="decode", core="1", connector=atlas(), block_size=128) as decode,
    ):
        yield prefill, decode


@pytest.mark.parametrize("ask", [with_all_fields, with_numbers_as_doubles, by_the_example])
def test_a_prompt_is_read_whatever_proxy_hands_it_on(
    ask: Ask, pair: tuple[Engine, Engine], right: Undisturbed
) -> None:
    with ExitStack() as stack:
        prefill, decode = (stack.enter_context(served(front_of(one))) for one in pair)
        for length in (65, 191, 517):
            said = ask(prefill, decode, {"prompt": prompt(length), "max_tokens": 8})
            (choice,) = said["choices"]
            assert_same(right("gemma3")[length], Answer(**choice, params=None), ask.__name__)
            assert said["named"], "the decode engine was told where to read it"
    # It fails what it cannot read, and warns of what it does not even try to.
    assert not pair[1].facts()["warned"]
    assert_nothing_held(*pair)
