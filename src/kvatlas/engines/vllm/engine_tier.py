"""The tier that an engine's setting names: opened by its workers, found by its scheduler.

Any number of engines, and all ranks of each, share the tier of a path: whichever worker
comes first owns the file, and serves the others. A tier in memory is one engine's own.
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
from kvatlas.tier import Converting, TierClient, share_file, share_memory, socket_beside
from kvatlas.tier.converting import TierRoutes
from kvatlas.tier.opening import stored_as

log = logging.getLogger("kvatlas.vllm")

IN_MEMORY = "memory"
"""What the setting says for a tier in host memory."""
_BLOCK = 64
"""Tokens of a tier's block, where the model's layers allow it."""
_MOVE_SECONDS = 10.0
"""Seconds after which a tier that does not answer a worker is a miss."""
_ASK_SECONDS = 5.0
"""Seconds after which a tier that does not answer the scheduler is a miss."""
_NOT_THERE = (Code.PEER_LOST, Code.DEADLINE)
_OTHERS = (Code.UNLIKE_MODELS, Code.UNLIKE_DTYPES, Code.UNLIKE_LAYERS, Code.MISSING_LAYERS)
"""Refusals of another model's blocks."""


def open_tier(
    where: str,
    memory: str,
    model: Model,
    own: Plan,
    engine_id: str,
    convert: Converting | None = None,
) -> TierClient | None:
    """The tier that a setting names, for one worker: a new one for a model, or what is there.

    With `convert` it is that of engines with another cache dtype. None for a file that is
    damaged or another model's: nothing is found in it, or kept.
    """
    if where == IN_MEMORY:
        made = _planned(model, memory, own)
        return share_memory(memory_socket(engine_id), made, seconds=_MOVE_SECONDS)
    stored = model if convert is None else stored_as(model, convert)
    new = None if Path(where).exists() else _planned(stored, memory, own)
    try:
        tier = share_file(where, new, durable=False, seconds=_MOVE_SECONDS)
    except AtlasError as refusal:
        if refusal.code in _NOT_THERE:
            raise
        log.error("nothing is kept or found again: %s", refusal)
        return None
    try:
        _check_stored(tier.plan, own, convert)
    except AtlasError as refusal:
        tier.close()
        if refusal.code not in _OTHERS:
            raise
        log.error("nothing is kept or found again: %s is the tier of %s", where, tier.plan)
        return None
    return tier


def _check_stored(stored: Plan, own: Plan, convert: Converting | None) -> None:
    """Refuse blocks that an engine cannot read, or not without being told how."""
    same = fingerprint(stored) == fingerprint(own)
    if convert is None and not same:
        raise AtlasError(Code.UNLIKE_MODELS, got=f"{stored}", hint="Name another file")
    if convert is None:
        return
    if same:
        raise AtlasError(
            Code.BAD_CONVERSION,
            "The file has this engine's own cache dtype",
            got=convert.name,
            hint="Leave convert out of kv_connector_extra_config",
        )
    TierRoutes(stored).to(own, convert)


def _planned(model: Model, memory: str, own: Plan) -> Plan:
    """The plan of a new tier for a model."""
    about: dict[str, Any] = {
        "memory": memory,
        "layout": "BLHNC",
        "block_size": _BLOCK,
        "in_flight": 0,
    }
    return plan(model, max_len=own.max_len, **about)


def find_tier(where: str, engine_id: str) -> TierClient | None:
    """The tier that an engine's workers have opened, for its scheduler; None where none has."""
    at = memory_socket(engine_id) if where == IN_MEMORY else socket_beside(Path(where))
    try:
        tier = TierClient(at, seconds=_ASK_SECONDS, patience=_ASK_SECONDS)
    except AtlasError as refusal:
        log.error("nothing is kept or found again: %s", refusal)
        return None
    tier.patience = 0.0  # from here on a tier that is gone is a miss at once
    return tier


def memory_socket(engine_id: str) -> Path:
    """Where the tier in memory of an engine is found by its own processes."""
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    name = blake2b(engine_id.encode(), digest_size=12).hexdigest()
    return folder / f"kvatlas-{os.geteuid()}-{name}.sock"
