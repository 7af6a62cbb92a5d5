"""A proxy in front of prefill and decode engines.

The proxy first sends a prompt to a prefill engine for one token. It then sends the prompt with the
`kv_transfer_params` of the response to a decode engine, and forwards the response as it arrives. If
no prefill engine responds, the decode engine computes the prompt. The proxy needs only Python's
standard library.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_LARGEST = 64 << 20
"""The maximum size of a request's body, in bytes."""
_SECONDS = 600.0
_CONNECT_SECONDS = 5.0
_SILENT_HOST = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""A connection ends if the engine's host does not answer for 11 seconds."""
_COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
_OF_THE_ANSWER = ("stream", "stream_options", "min_tokens", "max_completion_tokens")
"""Keys of a request that a prefill engine does not receive."""


class _Connection(http.client.HTTPConnection):
    """A connection to an engine, which may compute for long, but whose host must respond."""

    def connect(self) -> None:
        """Connect quickly or fail, and notice a host that vanishes during a request."""
        self.timeout = _CONNECT_SECONDS
        super().connect()
        self.sock.settimeout(_SECONDS)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _SILENT_HOST.items():
            if hasattr(socket, name):
                self.sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _Handler(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(_Connection, request)


_open = urllib.request.build_opener(_Handler).open


class Engines:
    """Prefill and decode engines, which receive requests in turn."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        self._prefill, self._decode = itertools.cycle(prefill), itertools.cycle(decode)

    def prefill(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
        """Return the parameters with which a decode engine reads a prompt; None to compute it."""
        if not _one_prompt(body):
            return None
        asked = {key: value for key, value in body.items() if key not in _OF_THE_ANSWER}
        asked |= {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        try:
            with self._post(next(self._prefill) + path, asked, headers) as answer:
                return json.load(answer).get("kv_transfer_params")
        except (OSError, ValueError) as problem:
            print(f"not prefilled: {problem}", file=sys.stderr, flush=True)
            return None

    def decode(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
        """Return a decode engine's response while it arrives."""
        return self._post(next(self._decode) + path, body, headers)

    def get(self, path: str) -> Any:
        """Return a decode engine's response to a GET request."""
        return _open(next(self._decode) + path)

    def _post(self, url: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
        about = {"Content-Type": "application/json"} | headers
        request = urllib.request.Request(url, json.dumps(body).encode(), about)  # noqa: S310
        return _open(request)


def _one_prompt(body: dict[str, Any]) -> bool:
    """Return whether a body is one request, because a prefill is read by one request only."""
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and any(not isinstance(part, int) for part in prompt)
    return not several and body.get("n", 1) == 1 and not body.get("use_beam_search")


class Handler(BaseHTTPRequestHandler):
    """The connection of one client."""

    engines: Engines
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Forward a GET request to a decode engine."""
        self._answer(lambda: self.engines.get(self.path))

    def do_POST(self) -> None:
        """Prefill a prompt in one engine and decode it in another one."""
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 < length <= _LARGEST:
            self._refuse(413, "the body must have 1 byte to 64 MiB")
            return
        try:
            body = json.loads(self.rfile.read(length))
        except ValueError:
            body = None
        if not isinstance(body, dict):
            self._refuse(400, "the body is not a JSON object")
            return
        body.pop("kv_transfer_params", None)  # these are between engines
        if self.path in _COMPLETIONS:
            params = self.engines.prefill(self.path, body, self._passed_on())
            if params is not None:
                body["kv_transfer_params"] = params
        self._answer(lambda: self.engines.decode(self.path, body, self._passed_on()))

    def _passed_on(self) -> dict[str, str]:
        names = ("Authorization", "X-Request-Id")
        return {name: self.headers[name] for name in names if name in self.headers}

    def _answer(self, ask: Any) -> None:
        try:
            answer = ask()
        except urllib.error.HTTPError as refusal:
            answer = refusal  # what an engine refuses, it explains itself
        except OSError as problem:
            self._refuse(502, f"no decode engine answers: {problem}")
            return
        with answer:
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers.get("Content-Type", "text/plain"))
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in _pieces(answer):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")

    def _refuse(self, status: int, why: str) -> None:
        self.close_connection = True
        said = json.dumps({"error": {"message": why}}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing, because engines log requests."""


def _pieces(answer: Any) -> Iterator[bytes]:
    """Yield the parts of a response as they arrive."""
    while piece := answer.read1(1 << 16):
        yield piece


def serve(address: tuple[str, int], engines: Engines) -> ThreadingHTTPServer:
    """Return a proxy that listens on an address; run it with `serve_forever`."""
    handler = type("BoundHandler", (Handler,), {"engines": engines})
    server = ThreadingHTTPServer(address, handler)
    server.daemon_threads = True
    return server


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1:8000", metavar="HOST:PORT")
    parser.add_argument("--prefill", action="append", required=True, metavar="URL")
    parser.add_argument("--decode", action="append", required=True, metavar="URL")
    given = parser.parse_args()
    host, _, port = given.listen.rpartition(":")
    serve((host, int(port)), Engines(given.prefill, given.decode)).serve_forever()


if __name__ == "__main__":
    main()
