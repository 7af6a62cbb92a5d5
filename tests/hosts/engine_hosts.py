"""vLLM engines on the two hosts of examples/two_hosts, started from its files and from the docs.

The hosts have the addresses of `hosts.env`, and each has its own `/run`. The name of the model is
that of the example, and leads to a folder with a tiny model of random weights. The command `vllm`
adds the flags that this model needs on CPUs; otherwise commands run as they are shipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from examples.vllm_pair import make_model

from tests.hosts.namespaces import inside, run_ip
from tests.hosts.networks import DEVICE, BridgedNetwork

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "two_hosts"
PAGE = ROOT / "docs" / "how-to" / "vllm.md"
VLLM = os.environ.get("KVATLAS_VLLM_PYTHON", "")
"""A Python with vLLM; empty if there is none."""
PREFILL, DECODE = 0, 1
MODEL = "Qwen/Qwen3-8B"
HTTP = {PREFILL: 8100, DECODE: 8200}
PROXY = 8000
START_SECONDS = 600.0
ANSWER_SECONDS = 400.0
_BLOCK = re.compile(r'^```sh title="([\w.]+)"\n(.*?)^```', re.MULTILINE | re.DOTALL)
_COUNTER = re.compile(r"^vllm:kvatlas_(\w+?)_total\{.*\} ([\d.e+]+)$", re.MULTILINE)
_RUN = 'mount --bind "$OWN_RUN" /run && exec "$@"'
"""Gives a command of a host the host's own /run. `ip netns exec` has made it a mount namespace."""
_WRAPPER = """#!/usr/bin/env bash
exec {python} -m vllm.entrypoints.openai.api_server --model "${{@:2}}" \\
    --dtype float32 --max-model-len 1024 --enforce-eager --num-gpu-blocks-override 64
"""
_CORES = {PREFILL: "0|1", DECODE: "1"}
_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}  # fmt: skip


class ExampleNetwork(BridgedNetwork):
    """Two hosts with the addresses of the example."""

    @staticmethod
    def address(host: int, number: int = 1) -> str:
        """An address of a host. Its first address is that of `hosts.env`."""
        return f"10.0.{number - 1}.{5 + host}"


def documented_files() -> dict[str, str]:
    """The engines' files in the section "Two hosts" of the page, by title."""
    section = PAGE.read_text().partition("\n## Two hosts\n")[2].partition("\n## ")[0]
    return dict(_BLOCK.findall(section))


class TwoHosts:
    """The two hosts: commands run on them, engines that are started and killed, and requests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.network = ExampleNetwork(2)
        try:
            for host, name in enumerate(self.network.hosts):
                (folder / f"run{host}").mkdir()
                run_ip("-n", name, "route", "add", "default", "dev", DEVICE)
            self._write_programs()
            self.write_weights("first", seed=7)
            self.write_weights("second", seed=8)
            self.serve_weights("first")
        except BaseException:
            self.network.close()
            raise

    def _write_programs(self) -> None:
        (self.folder / "bin").mkdir()
        program = self.folder / "bin" / "vllm"
        program.write_text(_WRAPPER.format(python=VLLM))
        program.chmod(0o755)
        for title, text in documented_files().items():
            (self.folder / title).write_text(text)

    # -- weights ----------------------------------------------------------------------------

    def write_weights(self, name: str, *, seed: int) -> None:
        """Write a checkpoint. All have one shape and one config, and each seed other weights."""
        make_model(self.folder / name, seed=seed)

    def serve_weights(self, name: str) -> None:
        """Have engines that start from now on find this checkpoint under the example's name."""
        path = self.folder / MODEL
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(self.folder / name, target_is_directory=True)

    # -- commands ---------------------------------------------------------------------------

    def start(self, host: int, *command: str, log: str) -> subprocess.Popen[bytes]:
        """Start a command on a host, in the folder with the documented files."""
        own = {
            "OWN_RUN": str(self.folder / f"run{host}"),
            "PYTHON": VLLM,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}:/usr/sbin:/sbin",
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "VLLM_CPU_OMP_THREADS_BIND": _CORES[host] if (os.cpu_count() or 1) > 1 else "auto",
        }
        words = inside(self.network.hosts[host], "sh", "-c", _RUN, "sh")
        with (self.folder / log).open("ab") as output:
            return subprocess.Popen(
                [*words, *command], stdout=output, stderr=output, cwd=self.folder,
                env=os.environ | _SETTINGS | own, start_new_session=True,
            )  # fmt: skip

    def run(self, host: int, *command: str) -> str:
        """Run a command on a host, and return what it prints."""
        log = f"command-{time.monotonic_ns()}.log"
        process = self.start(host, *command, log=log)
        code = process.wait(120)
        said = (self.folder / log).read_text()
        assert code == 0, f"{' '.join(command)}: {said}"
        return said

    def serve(self, host: int, role: str) -> None:
        """Start a part by the script of the example."""
        self.start(host, str(EXAMPLE / "serve.sh"), role, log=f"{role}.log")

    def serve_documented(self, host: int, role: str) -> None:
        """Start an engine by the file of the documentation."""
        self.start(host, "sh", f"{role}.sh", log=f"{role}.log")

    def share_secret(self) -> None:
        """Create the secret on the first host, and copy it to the second."""
        self.run(PREFILL, str(EXAMPLE / "serve.sh"), "secret")
        secret = self.folder / f"run{PREFILL}" / "secrets"
        shutil.copytree(secret, self.folder / f"run{DECODE}" / "secrets")

    def kill(self, host: int) -> None:
        """Kill every process of a host. Its peers are not told: its device is down before."""
        self.network.set_up(host, up=False)
        for pid in run_ip("netns", "pids", self.network.hosts[host]).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def end(self, host: int) -> None:
        """End the engine of a host in order, and wait for it. The proxy goes on."""
        pids = run_ip("netns", "pids", self.network.hosts[host]).split()
        engines = [int(pid) for pid in pids if b"proxy.py" not in _command(int(pid))]
        for pid in engines:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 60
        while any(_command(pid) for pid in engines) and time.monotonic() < deadline:
            time.sleep(0.2)

    def restore(self, host: int) -> None:
        """Set the device of a killed host up again."""
        self.network.set_up(host, up=True)
        run_ip("-n", self.network.hosts[host], "route", "replace", "default", "dev", DEVICE)

    # -- requests ---------------------------------------------------------------------------

    def await_part(self, host: int, port: int, role: str) -> None:
        """Wait until a part answers at its address, from the host itself."""
        url = f"http://{self.network.address(host)}:{port}/health"
        deadline = time.monotonic() + START_SECONDS
        while self._curl(host, url, seconds=5)[0]:
            assert time.monotonic() < deadline, f"{role} does not start: {self.log(role)[-3000:]}"
            time.sleep(1)

    def complete(self, prompt: str, *, port: int = PROXY, host: int = DECODE, **more: Any) -> Any:
        """Ask a part for a greedy completion, from the decode host; its answer as JSON."""
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, "ignore_eos": True} | more
        url = f"http://{self.network.address(host)}:{port}/v1/completions"
        code, said = self._curl(DECODE, url, body=body)
        assert code == 0, f"curl ended with {code}: {said}"
        return json.loads(said)

    def counters(self, host: int = DECODE) -> dict[str, float]:
        """What the connector of a host's engine has counted since its start."""
        url = f"http://{self.network.address(host)}:{HTTP[host]}/metrics"
        code, said = self._curl(host, url)
        assert code == 0, code
        return {name: float(value) for name, value in _COUNTER.findall(said)}

    def _curl(
        self, host: int, url: str, *, body: Any = None, seconds: float = ANSWER_SECONDS
    ) -> tuple[int, str]:
        words = inside(self.network.hosts[host], "curl", "--silent", "--show-error")
        words += ["--fail-with-body", "--max-time", str(seconds), url]
        if body is not None:
            words += ["--header", "Content-Type: application/json", "--data", json.dumps(body)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    def log(self, role: str) -> str:
        """What a part has logged so far."""
        path = self.folder / f"{role}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def close(self) -> None:
        """End everything, and delete the hosts."""
        self.network.close()


def greedy(model: Path, prompts: Sequence[str], tokens: int) -> list[list[str]]:
    """What transformers continues prompts with: an oracle that shares no code with vLLM."""
    import torch
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    made.generation_config.eos_token_id = None  # as with `ignore_eos`
    answers = []
    for prompt in prompts:
        ids = torch.tensor([[int(word[1:]) for word in prompt.split()]])
        settings = {"max_new_tokens": tokens, "do_sample": False}
        with torch.no_grad():
            whole = made.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        answers.append([f"w{n}" for n in whole[0, ids.shape[1] :].tolist()])
    return answers


def words_of(answer: Any) -> list[str]:
    """The words of a completion."""
    return re.findall(r"w\d+", answer["choices"][0]["text"])


def why_not() -> str:
    """Return why engines cannot run here; empty if they can."""
    if not VLLM or not Path(VLLM).exists():
        return "KVATLAS_VLLM_PYTHON names no Python with vLLM (make test-hosts sets it)"
    if not shutil.which("curl") or not shutil.which("bash"):
        return "curl and bash are needed"
    return "" if sys.platform == "linux" else "namespaces need Linux"


def _command(pid: int) -> bytes:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
