"""Bad handshakes, as files: each is what a hostile peer puts on the wire, and what it is told.

`NAME.z` holds the bytes of one message, its length in front, compressed, so that messages of
megabytes stay small here. `expected.json` says for each how it must be answered: a code, or
`welcome`, `send_plan`, or `nothing` where the message is not whole.
`python -m tests.wire.corpus.make` writes them all anew.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

HERE = Path(__file__).parent


def expected() -> dict[str, str]:
    """The answer that each file must get, by its name."""
    answers = json.loads((HERE / "expected.json").read_text())
    return {str(name): str(answer) for name, answer in answers.items()}


def frame(name: str) -> bytes:
    """What the file puts on the wire."""
    return zlib.decompress((HERE / f"{name}.z").read_bytes())
