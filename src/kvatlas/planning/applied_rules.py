"""The engine rules that apply to a model on a chip, and the sentences that explain them."""

from __future__ import annotations

from collections.abc import Iterator

from kvatlas.models import Model
from kvatlas.planning.engine_rules import (
    CHIPS,
    RECORDED,
    EngineRules,
    PrefillCheckpoint,
)
from kvatlas.planning.request import PlanRequest
from kvatlas.specs import Recurrent, Spec


def applied_checkpoints(
    model: Model, rules: EngineRules, chip: str | None
) -> dict[Spec, PrefillCheckpoint]:
    """Return the rule by which prefills save recurrent states, for each spec that has such a rule.

    Some rules align the block size. These rules apply only if every recurrent spec of the model has
    such a rule.
    """
    found = {spec: rules.checkpoint(model, spec, chip) for spec in _recurrent_specs(model)}
    aligned = all(rule is not None and rule.alignment > 1 for rule in found.values())
    return {
        spec: rule
        for spec, rule in found.items()
        if rule is not None and (rule.alignment == 1 or aligned)
    }


def _recurrent_specs(model: Model) -> set[Recurrent]:
    return {layer.spec for layer in model.layers if isinstance(layer.spec, Recurrent)}


def rule_reasons(request: PlanRequest) -> Iterator[str]:
    """Yield sentences that explain the rules that depend on the release of vLLM or the chip."""
    release = f"vLLM {request.rules.version}"
    for rule in dict.fromkeys(request.checkpoints.values()):
        if not rule.chips:
            continue
        aligned = ""
        if rule.alignment > 1:
            aligned = f", and the block size is a multiple of {rule.alignment} tokens"
        yield (
            f"On {request.chip}, {release} prefills recurrent layers with {rule.kernel}, which "
            "saves a state in the middle of a prefill. A request therefore holds 3 blocks instead "
            f"of 2 in each recurrent group{aligned}."
        )
    if "@" in request.policy or request.chip is not None:
        chip = request.chip or "any chip"
        used = ", ".join(dict.fromkeys(b.name for b in request.backends.values() if b))
        with_backends = f", which selects {used}" if used else ""
        yield f"The rules are those of {release} on {chip}{with_backends}."


_SPECIAL = ("sparse", "indexer", "other")
"""Families of backends whose requirements differ between chips."""


def chip_warnings(request: PlanRequest) -> Iterator[str]:
    """Yield a warning if the chip is a problem for vLLM's plan.

    Either vLLM refuses a backend of the model on this chip, or no plan of vLLM for this chip is
    known, or vLLM's plan depends on the chip and the caller passed no chip.
    """
    layers = [(request.backends[layer.name], layer.spec) for layer in request.model.layers]
    used = dict.fromkeys((backend.name, spec) for backend, spec in layers if backend)
    found = ((name, request.rules.lacking(name, request.chip, spec)) for name, spec in used)
    refused = {name: rule for name, rule in found if rule is not None}
    if refused:
        release, named = f"vLLM {request.rules.version}", ", ".join(refused)
        if any(rule.chips for rule in refused.values()):
            yield (
                f"{release} refuses this model on {request.chip}, where it has no kernels of "
                f"{named} for these caches. The plan is that of another chip."
            )
        else:
            yield (
                f"{release} refuses this model, because it does not have {named}. The plan is that "
                "of a newer release."
            )
    special = any(b.family in _SPECIAL for b in request.backends.values() if b)
    if request.chip not in (None, *RECORDED) and (special or request.policy.startswith("vllm")):
        yield (
            f"The rules of vLLM {request.rules.version} on {request.chip} were not compared with "
            "vLLM's own plans."
        )
    if request.chip is not None or request.policy.startswith("atlas"):
        return
    if not request.prefix_caching or not _recurrent_specs(request.model):
        return
    differs = [
        chip
        for chip in CHIPS
        if applied_checkpoints(request.model, request.rules, chip) != request.checkpoints
    ]
    if differs:
        yield (
            f"vLLM {request.rules.version} plans this model differently on {', '.join(differs)}, "
            "where a request holds one more block per recurrent group. Name the chip or the GPU."
        )
