"""All claims, and a process that tries one of them over one transport."""

from __future__ import annotations

import faulthandler
import json
import logging
import sys

from tests.attack.claims import Attack, Claim
from tests.attack.deadlines import behind_stuck_pulls, many_at_once, stalled_replicas
from tests.attack.forged import forged_messages
from tests.attack.kills import killed_peers
from tests.attack.locks import contended_locks
from tests.attack.plans import WIRES
from tests.attack.stops import stopped_pushers, stopped_sources

CLAIMS: dict[str, Claim] = {
    "stopped source, blocks reused: no late byte": stopped_sources,
    "stopped pusher, blocks reused: no late byte": stopped_pushers,
    "killed peer: no wrong byte, nothing left": killed_peers,
    "forged messages change nothing": forged_messages,
    "locks under contention: everything ends": contended_locks,
    "a pull of 1 s behind 80 that are stuck": behind_stuck_pulls,
    "a stalled replica leaves time for another": stalled_replicas,
    "64 pulls at once, right to the byte": many_at_once,
}
MARK = "outcome "
"""Before the line for whoever started the process: transports print to stdout too."""


def main(label: str, claim: str, tries: str, tokens: str, seed: str) -> None:
    """Try one claim, and print what came of it."""
    faulthandler.enable()
    logging.getLogger("kvatlas").setLevel(logging.CRITICAL)
    outcome = CLAIMS[claim](Attack(WIRES[label], int(tries), int(tokens), int(seed)))
    print(f"\n{MARK}{json.dumps(outcome.as_json())}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
