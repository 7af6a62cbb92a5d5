"""Prefill prompts in one vLLM engine and decode them in another one of a different topology.

The script starts vLLM's server twice on this machine with a tiny model of random weights: a prefill
engine of two ranks with blocks of 64 tokens, and a decode engine of one rank with blocks of 128.
It sends prompts as a proxy does: first to the prefill engine for one token, then, with the
`kv_transfer_params` of the response, to the decode engine. The decode engine also completes each
prompt alone, and the two completions must be equal.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

START_SECONDS = ANSWER_SECONDS = 600.0
TOKENS = 12
LENGTHS = (63, 64, 130, 400)
_CONNECTOR = {
    "kv_connector": "KVAtlasConnector",
    "kv_connector_module_path": "kvatlas.engines.vllm",
    "kv_role": "kv_both",
}
ENGINES = {
    "prefill": ("--tensor-parallel-size", "2", "--block-size", "64"),
    "decode": ("--tensor-parallel-size", "1", "--block-size", "128"),
}
SERVER = "vllm.entrypoints.openai.api_server"
_CORES = {"prefill": "0|1", "decode": "1"}
"""Cores of each rank: engines that share them otherwise wait for each other."""
_ERROR = re.compile(r"\b\w*(?:Error|Exception): .+")
_PULLED = re.compile(r"^vllm:kvatlas_(\w+?)(?:_total)?\{.*\} ([\d.e+]+)$", re.MULTILINE)


class DemoError(Exception):
    """The reason why the demo stopped, in one sentence."""


def main() -> int:
    """Start both engines, send prompts, and print the results. Return the exit status."""
    console = Console(soft_wrap=True)
    try:
        return show(console)
    except DemoError as failure:
        console.print(f"The demo failed: {failure}", markup=False, highlight=False)
        return 1


def show(console: Console) -> int:
    """Run the demo. Return 0 if all completions were equal, otherwise 1."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "tiny-llama")
        console.print(
            "Starting two vLLM engines: prefill (tp 2, block 64), decode (tp 1, block 128)."
        )
        with served(model, "prefill") as prefill, served(model, "decode") as decode:
            for engine in (prefill, decode):
                engine.wait()
            rows = [ask(prefill, decode, length) for length in LENGTHS]
            pulled = decode.counters()
    table = Table(title="One prompt: prefilled by one engine, decoded by the other")
    for column in ("prompt tokens", "kB read", "seconds", "the tokens of one engine alone"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(
        f"The decode engine read {pulled.get('pulls', 0):.0f} requests, "
        f"{pulled.get('nbytes', 0) / 1e6:.2f} MB, in {pulled.get('seconds', 0):.2f} s; "
        f"{pulled.get('failures', 0):.0f} failed."
    )
    return 0 if all(row[-1] == "yes" for row in rows) and not pulled.get("failures") else 1


class Served:
    """A client of one running vLLM server."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.name, self._process, self._log = name, process, log
        self._url = f"http://127.0.0.1:{port}"

    def wait(self) -> None:
        """Wait until the server responds."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                self._get("/health").close()
            except (urllib.error.URLError, OSError):
                time.sleep(1)
            else:
                return
        code = self._process.poll()
        ended = (
            f"ended with {code}" if code is not None else f"did not answer in {START_SECONDS:g} s"
        )
        raise DemoError(f"the {self.name} engine {ended} while it started: {self._last_error()}")

    def _last_error(self) -> str:
        """Return the last error in the engine's log, or the last line if there is no error."""
        said = self._log.read_text(errors="replace").strip()
        errors = _ERROR.findall(said)
        return (errors or said.splitlines() or ["its log is empty"])[-1]

    def _get(self, path: str) -> Any:
        return urllib.request.urlopen(f"{self._url}{path}", timeout=30)  # noqa: S310

    def complete(self, prompt: str, tokens: int, params: Any = None) -> dict[str, Any]:
        """Return the response to a prompt, with greedy sampling."""
        body: dict[str, Any] = {
            "model": "tiny-llama",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        if params is not None:
            body["kv_transfer_params"] = params
        request = urllib.request.Request(  # noqa: S310
            f"{self._url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:  # noqa: S310
                found: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as refusal:
            said = " ".join(refusal.read().decode(errors="replace").split())
            problem = f"{refusal.code} {refusal.reason}: {said[:300]}"
        except OSError as problem_of_network:
            problem = str(problem_of_network)
        else:
            return found
        about = f"a prompt of {len(prompt.split())} words"
        raise DemoError(
            f"the {self.name} engine did not complete {about} ({problem}); "
            f"its last message is: {self._last_error()}"
        )

    def counters(self) -> dict[str, float]:
        """Return the counters of the engine's connector."""
        with self._get("/metrics") as answer:
            text = answer.read().decode()
        return {name: float(value) for name, value in _PULLED.findall(text)}


@contextmanager
def served(model: Path, name: str) -> Iterator[Served]:
    """Run an engine in separate processes until the `with` block ends."""
    port = free_port()
    log = model.parent / f"{name}.log"
    command = [
        sys.executable, "-m", SERVER, "--model", str(model),
        "--port", str(port), "--served-model-name", "tiny-llama", "--dtype", "float32",
        "--max-model-len", "1024", "--enforce-eager", "--no-enable-prefix-caching",
        *ENGINES[name], "--kv-transfer-config", json.dumps(_CONNECTOR),
    ]  # fmt: skip
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": _CORES[name] if (os.cpu_count() or 1) > 1 else "auto",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603
            command, stdout=output, stderr=output, env=os.environ | settings,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield Served(name, process, port, log)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port


def make_model(folder: Path | str, *, seed: int = 7) -> Path:
    """Save a tiny Llama with random weights, whose vocabulary is w0 to w511."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=2048,
        tie_word_embeddings=False, initializer_range=0.08,
    )  # fmt: skip
    LlamaForCausalLM(config).float().save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{n}": n for n in range(512)}, unk_token="w0"))  # noqa: S106
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)  # noqa: S106
    return Path(folder)


def ask(prefill: Served, decode: Served, length: int) -> list[str]:
    """Complete a prompt with both engines, and with one alone. Return a row of the table."""
    chosen = random.Random(length)  # noqa: S311
    prompt = " ".join(f"w{chosen.randrange(1, 512)}" for _ in range(length))
    alone = decode.complete(prompt, TOKENS)
    before, begun = decode.counters(), time.monotonic()
    handed = prefill.complete(prompt, 1, {"do_remote_decode": True})
    answer = decode.complete(prompt, TOKENS, handed["kv_transfer_params"])
    taken, after = time.monotonic() - begun, decode.counters()
    read = after.get("nbytes", 0.0) - before.get("nbytes", 0.0)
    same = answer["choices"][0]["text"] == alone["choices"][0]["text"]
    return [f"{length:,}", f"{read / 1e3:,.1f}", f"{taken:.2f}", "yes" if same and read else "NO"]


if __name__ == "__main__":
    sys.exit(main())
