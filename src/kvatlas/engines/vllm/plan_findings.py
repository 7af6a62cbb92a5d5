"""Compare the plans of two engines: model, dtypes, topology, layout and groups."""

from __future__ import annotations

from kvatlas.engines.vllm.engine_pair import Ends, Finding, finding
from kvatlas.errors import Code
from kvatlas.planning import Group, Plan
from kvatlas.routing import Check, check
from kvatlas.specs import Visibility


def plan_findings(ends: Ends, tokens: int) -> tuple[list[Finding], Check | None]:
    """Return a tuple (findings about both plans, cost of a transfer of `tokens` tokens).

    The cost is None if no transfer is possible.
    """
    for name, end in zip(("prefill", "decode"), ends, strict=True):
        if end.refusal is not None:
            refusal = end.refusal
            why = f"the {name} engine cannot be planned: {refusal.problem}. {refusal.hint}"
            told = {name: str(refusal.got), "decode" if name == "prefill" else "prefill": "-"}
            return [Finding("plan", told["prefill"], told["decode"], "no", why)], None
    source, destination = (end.plan for end in ends)
    assert source is not None  # noqa: S101
    assert destination is not None  # noqa: S101
    moves = check(source, destination, tokens=min(tokens, source.max_len, destination.max_len))
    unlike = {reason.code: reason.got for reason in moves.reasons}
    dtypes = "must be the same in both" if unlike.pop(Code.UNLIKE_DTYPES, "") else ""
    findings = [
        _model(source, destination, moves, "; ".join(unlike.values())),
        Finding(
            "cache dtype",
            dtypes_of(source),
            dtypes_of(destination),
            "no" if dtypes else "ok",
            dtypes,
        ),
        _topology(source, destination),
        Finding(
            "layout",
            source.layout,
            destination.layout,
            why=_turned(source.layout, destination.layout),
        ),
        finding("block", (f"{end.block_size:,} tokens" for end in (source, destination))),
        finding("groups", (_groups(end) for end in (source, destination))),
        *_partial(source, destination),
        _lengths(source, destination),
    ]
    return findings, moves if moves.ok else None


def _model(source: Plan, destination: Plan, moves: Check, unlike: str) -> Finding:
    both = zip((source, destination), moves.fingerprints, strict=True)
    prints = [f"{plan.model} ({one[:8]})" for plan, one in both]
    if unlike:
        return finding("model", prints, "no", unlike)
    if source.model != destination.model:
        why = "the layers are the same, but the names differ: make sure the weights are the same"
        return finding("model", prints, "look", why)
    return finding("model", prints)


def dtypes_of(plan: Plan) -> str:
    """Return the cache dtypes of a plan's layers, as text."""
    found: dict[str, None] = {}
    for region in plan.regions:
        for layer in region.layers:
            spec = plan.spec(layer.name)
            cache = getattr(spec, "cache", "auto")
            names = ("conv_dtype", "ssm_dtype") if hasattr(spec, "ssm_dtype") else ("dtype",)
            own = [str(getattr(spec, name, "")) for name in names] if cache == "auto" else [cache]
            found |= dict.fromkeys(filter(None, own))
    return ", ".join(found)


def _topology(source: Plan, destination: Plan) -> Finding:
    said = [", ".join(f"{name} {n}" for name, n in _sizes(plan)) for plan in (source, destination)]
    if source.dcp > 1 or destination.dcp > 1:
        why = "the connector does not support context parallelism"
        return finding("ranks", said, "no", why)
    why = (
        ""
        if (source.tp, source.pp) == (destination.tp, destination.pp)
        else "heads and layers are resharded in transit"
    )
    return finding("ranks", said, why=why)


def _sizes(plan: Plan) -> list[tuple[str, int]]:
    return [("tp", plan.tp), ("pp", plan.pp), *([("dcp", plan.dcp)] if plan.dcp > 1 else [])]


def _turned(source: str, destination: str) -> str:
    return "" if source == destination else "the layout is converted in transit"


def _groups(plan: Plan) -> str:
    kinds: dict[str, int] = {}
    for group in plan.groups:
        kinds[group.kind] = kinds.get(group.kind, 0) + 1
    return ", ".join(kind if n == 1 else f"{n} x {kind}" for kind, n in kinds.items())


def _partial(source: Plan, destination: Plan) -> list[Finding]:
    """Return findings about layers that keep only some tokens.

    Layers with sliding windows or recurrent states keep only some tokens.
    """
    findings = []
    windows = [windows_of(plan) for plan in (source, destination)]
    if any(windows):
        why = "prefill omits the last token of the prompt, and decode computes it"
        findings.append(finding("windows", (w or "all tokens" for w in windows), why=why))
    states = [
        sum(group.kind == "recurrent" for group in plan.groups) for plan in (source, destination)
    ]
    if any(states):
        said = [f"{n} group{'s' * (n != 1)}" if n else "none" for n in states]
        why = "the state before the prompt's last token is transferred"
        findings.append(finding("recurrent states", said, why=why))
    return findings


def windows_of(plan: Plan) -> str:
    """Return the windows of a plan's groups, as text; empty if there are none."""
    seen = {window for group in plan.groups if (window := _window(group))}
    return ", ".join(f"{window:,}" for window in sorted(seen))


def _window(group: Group) -> int | None:
    if group.visibility == Visibility():
        return None
    return group.visibility.window or group.visibility.chunk


def _lengths(source: Plan, destination: Plan) -> Finding:
    said = [f"{plan.max_len:,} tokens" for plan in (source, destination)]
    if source.max_len > destination.max_len:
        return finding(
            "longest request", said, "look", "the decode engine rejects the longest prompts"
        )
    return finding("longest request", said)
