"""Bad handshakes, as files: each is what a hostile peer puts on the wire, and what it is told.

`NAME.z` holds the frames of one message: a msgpack list, compressed, so that messages of
megabytes stay small here. `expected.json` says for each how it must be answered: a code, or
`welcome`, `send_plan`, or `nothing` where the message is too large to be looked at.
`python -m tests.wire.corpus.make` writes them all anew.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import msgspec

HERE = Path(__file__).parent


def expected() -> dict[str, str]:
    """The answer that each file must get, by its name."""
    answers = json.loads((HERE / "expected.json").read_text())
    return {str(name): str(answer) for name, answer in answers.items()}


def frames(name: str) -> list[bytes]:
    """What the file puts on the wire."""
    packed = zlib.decompress((HERE / f"{name}.z").read_bytes())
    return msgspec.msgpack.decode(packed, type=list[bytes])
