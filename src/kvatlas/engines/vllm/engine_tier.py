"""Open a tier in a file or in host memory for an engine's workers and its scheduler.

The first worker that opens a file serves it to all other workers and schedulers of all engines on
this host. A tier in memory is used by one engine only.
"""

from __future__ import annotations

import logging
import os
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvatlas.errors import AtlasError, Code
from kvatlas.models import Model
from kvatlas.planning import Plan, plan
from kvatlas.routing import fingerprint
from kvatlas.tier import Converting, TierClient, share_file, share_memory
from kvatlas.tier.converting import TierRoutes
from kvatlas.tier.file_owner import socket_beside
from kvatlas.tier.opening import stored_as

log = logging.getLogger("kvatlas.vllm")

IN_MEMORY = "memory"
"""The value of the `tier` setting for a tier in host memory."""
_BLOCK = 64
"""Preferred tokens per block of a tier, if the model's layers allow it."""
_MOVE_SECONDS = 10.0
"""Timeout of a worker's calls to the tier, in seconds; a timeout counts as a miss."""
_ASK_SECONDS = 5.0
"""Timeout of the scheduler's calls to the tier, in seconds; a timeout counts as a miss."""
_NOT_THERE = (Code.PEER_LOST, Code.DEADLINE)
_OTHERS = (Code.UNLIKE_MODELS, Code.UNLIKE_DTYPES, Code.UNLIKE_LAYERS, Code.MISSING_LAYERS)
"""Errors that mean that the file contains blocks of another model or dtype."""


def open_tier(
    where: str,
    memory: str,
    model: Model,
    own: Plan,
    engine_id: str,
    convert: Converting | None = None,
) -> TierClient | None:
    """Open the configured tier for one worker; create it if it does not exist.

    If `convert` is given, a tier in a file stores blocks in the source dtype of this conversion.
    Return None if the file is damaged or belongs to another model; the engine then runs without a
    tier.
    """
    if where == IN_MEMORY:
        made = _planned(model, memory, own)
        return share_memory(memory_socket(engine_id), made, timeout=_MOVE_SECONDS)
    stored = model if convert is None else stored_as(model, convert)
    new = None if Path(where).exists() else _planned(stored, memory, own)
    try:
        tier = share_file(where, new, durable=False, timeout=_MOVE_SECONDS)
    except AtlasError as refusal:
        if refusal.code in _NOT_THERE:
            raise
        log.error("tier disabled: %s", refusal)
        return None
    try:
        _check_stored(tier.plan, own, convert)
    except AtlasError as refusal:
        tier.close()
        if refusal.code not in _OTHERS:
            raise
        log.error("tier disabled: %s contains blocks of another plan: %s", where, tier.plan)
        return None
    return tier


def _check_stored(stored: Plan, own: Plan, convert: Converting | None) -> None:
    """Raise an error if an engine with the plan `own` cannot read a tier with the plan `stored`."""
    same = fingerprint(stored) == fingerprint(own)
    if convert is None and not same:
        got = f"a tier with {stored}, and an engine with {own}"
        problem = "The tier stores caches of another model or of another cache dtype"
        raise AtlasError(Code.UNLIKE_MODELS, problem, got=got, hint="Set tier to another file")
    if convert is None:
        return
    if same:
        raise AtlasError(
            Code.BAD_CONVERSION,
            "The tier already stores this engine's cache dtype, so there is nothing to convert",
            got=repr(convert.name),
            hint="Remove convert from kv_connector_extra_config",
        )
    TierRoutes(stored).to(own, convert)


def _planned(model: Model, memory: str, own: Plan) -> Plan:
    """Return a plan for a new tier that supports the longest request of the engine's plan `own`."""
    about: dict[str, Any] = {
        "memory": memory,
        "layout": "BLHNC",
        "block_size": _BLOCK,
        "in_flight": 0,
    }
    return plan(model, max_len=own.max_len, **about)


def find_tier(where: str, engine_id: str) -> TierClient | None:
    """Connect the scheduler to the tier that the workers opened; None if there is none."""
    at = memory_socket(engine_id) if where == IN_MEMORY else socket_beside(Path(where))
    try:
        tier = TierClient(at, timeout=_ASK_SECONDS, connect_timeout=_ASK_SECONDS)
    except AtlasError as refusal:
        log.error("tier disabled: %s", refusal)
        return None
    tier.connect_timeout = 0.0  # from now on, an unreachable tier is an immediate miss
    return tier


def memory_socket(engine_id: str) -> Path:
    """Return the socket path at which an engine's processes reach its tier in memory."""
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    name = blake2b(engine_id.encode(), digest_size=12).hexdigest()
    return folder / f"kvatlas-{os.geteuid()}-{name}.sock"
