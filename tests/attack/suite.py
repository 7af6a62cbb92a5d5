"""All claims, and a process that tries one of them over one transport."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
from dataclasses import dataclass

from tests.attack.by_tests import holds_in
from tests.attack.claims import Attack, Claim, Outcome
from tests.attack.deadlines import behind_stuck_pulls, many_at_once, stalled_replicas
from tests.attack.forged import forged_messages
from tests.attack.forks import forked_children
from tests.attack.hostile_readers import hostile_readers
from tests.attack.kills import killed_peers
from tests.attack.locks import contended_locks
from tests.attack.opened_again import opened_again
from tests.attack.other_weights import other_weights
from tests.attack.plans import WIRES, Wire
from tests.attack.replaced_pushers import replaced_pushers
from tests.attack.same_blocks import owned_blocks, pulls_at_once, quarantined_blocks
from tests.attack.separate_peers import separate_peers
from tests.attack.sessions import thousands_of_sessions
from tests.attack.stopped_readers import stopped_readers
from tests.attack.stops import stopped_pushers, stopped_sources

MARK = "outcome "
"""Before the line for whoever started the process: transports print to stdout too."""
_ALL = tuple(WIRES)
_MOST = ("shm", "tcp", "nixl", "mooncake")
"""Without NIXL over TCP, which is NIXL once more but for peers that stop and die."""
_SIDE, _DISK = ("side channel",), ("files",)
"""What is attacked in place of a transport."""


@dataclass(frozen=True)
class Row:
    """A claim, and over what it is tried."""

    claim: Claim
    over: tuple[str, ...] = _MOST


def long_beside_short(attack: Attack) -> Outcome:
    """Long requests arrive whole, and a short one beside them takes no second."""
    from tests.attack.long_contexts import thin

    os.environ.pop("MC_TRANSFER_TIMEOUT", None)  # no peer is stopped, so reads may take longer
    outcome = Outcome()
    for _ in range(max(1, attack.tries // 25)):
        for tokens, at_once in ((1 << 15, 2), (1 << 19, 4)):
            result = thin(tokens, transport=attack.wire.name, at_once=at_once)
            said = ("wrong", "beside_pools", "slowest_short_pull", "short_alone")
            outcome.add([] if result["held"] else [str({name: result[name] for name in said})])
    return outcome


CLAIMS: dict[str, Row] = {
    "stopped source, blocks reused: no late byte": Row(stopped_sources, _ALL),
    "stopped pusher, blocks reused: no late byte": Row(stopped_pushers, _ALL),
    "killed peer: no wrong byte, nothing left": Row(killed_peers, _ALL),
    "forked children keep no dead peer alive": Row(forked_children),
    "different weights are refused": Row(other_weights, _ALL),
    "a stopped pusher's bytes never reach a ready request": Row(replaced_pushers, _ALL),
    "an announcement by any peer takes nothing away": Row(opened_again),
    "two pulls into the same blocks: one owner": Row(pulls_at_once, _ALL),
    "offered and expected blocks are not pulled into": Row(owned_blocks),
    "quarantined blocks have no new owner": Row(quarantined_blocks, _ALL),
    "stopped readers keep no buffers from others": Row(stopped_readers),
    "shared staging: a peer sees and changes no other's bytes": Row(separate_peers, ("shm", "tcp")),
    "forged messages change nothing": Row(forged_messages),
    "a peer reads the bytes of its lease alone": Row(hostile_readers, ("tcp",)),
    "attackers on the network read and change nothing": Row(
        holds_in(
            "tests/wire/test_data_plane.py::test_a_process_without_the_secret_reads_nothing",
            "tests/wire/test_data_plane.py::test_bytes_that_are_changed_on_their_way_are_detected",
            "tests/wire/test_data_plane.py::test_a_lease_that_ends_stops_what_is_being_sent",
            "tests/wire/test_floods.py",
        ),
        _SIDE,
    ),
    "locks under contention: everything ends": Row(contended_locks),
    "a pull of 1 s behind 66 that are stuck": Row(behind_stuck_pulls),
    "a stalled replica leaves time for another": Row(stalled_replicas),
    "64 pulls at once, right to the byte": Row(many_at_once),
    "long pulls hold up no short one": Row(long_beside_short),
    "4,200 sessions: nobody refused, nothing left": Row(thousands_of_sessions, ("shm", "tcp")),
    "crowds and slow talkers lock nobody out": Row(
        holds_in(
            "tests/wire/test_connections.py::test_idle_connections_lock_nobody_out",
            "tests/wire/test_connections.py::test_who_speaks_too_slowly_is_hung_up_on",
            "tests/wire/test_connections.py::test_connections_are_bounded_for_each_peer",
            "tests/wire/transports/test_shm_segments.py::"
            "test_thousands_of_strangers_do_not_keep_a_peer_out",
            "tests/wire/transports/test_shm_segments.py::test_one_process_cannot_have_all_links",
        ),
        _SIDE,
    ),
    "silent and dead hosts are noticed": Row(
        holds_in(
            "tests/wire/test_heartbeats.py::test_a_host_that_falls_silent_is_noticed",
            "tests/wire/test_connections.py::test_a_peer_that_is_killed_is_lost_at_once",
        ),
        _SIDE,
    ),
    "junk and wrong secrets get no answer": Row(
        holds_in(
            "tests/wire/test_security.py::test_a_stranger_learns_nothing_of_who_answers",
            "tests/wire/test_security.py::test_who_names_the_secret_must_know_it",
            "tests/wire/test_security.py::test_ends_that_share_no_secret_refuse_each_other",
            "tests/wire/test_fuzz.py",
            "tests/wire/test_corpus.py",
        ),
        _SIDE,
    ),
    "what was recorded does nothing again": Row(
        holds_in(
            "tests/wire/test_security.py::"
            "test_what_was_recorded_does_nothing_when_it_is_said_again",
        ),
        _SIDE,
    ),
    "no hello ends another's session": Row(
        holds_in(
            "tests/wire/test_welcomes.py::test_a_hello_in_the_name_of_another_ends_nothing",
            "tests/wire/test_welcomes.py::test_thousands_of_hellos_end_nobodys_session",
        ),
        _SIDE,
    ),
    "a Close that is forged readies and releases nothing": Row(
        holds_in(
            "tests/wire/test_pushes.py::test_an_announcement_without_an_offer_is_not_ready",
            "tests/wire/test_quarantine.py::test_an_offer_is_read_by_those_it_names",
            "tests/wire/test_hostile_peers.py::test_leases_of_other_sessions_are_out_of_reach",
            "tests/wire/test_hostile_peers.py::"
            "test_a_reader_that_reads_nothing_releases_nothing_it_should_not",
            "tests/wire/test_hostile_peers.py::test_who_was_sent_nothing_has_read_nothing",
        ),
        _SIDE,
    ),
    "nothing listens beyond the loopback unasked": Row(
        holds_in(
            "tests/wire/test_security.py::test_listening_beyond_this_host_takes_a_secret",
            "tests/wire/transports/test_socket_filter.py::test_nothing_listens_beyond_the_loopback",
            "tests/wire/transports/test_socket_filter.py::"
            "test_a_transport_beyond_this_host_takes_a_secret",
        ),
        _SIDE,
    ),
    "changed metadata neither crashes nor locks out": Row(
        holds_in(
            "tests/wire/transports/test_nixl_metadata.py::"
            "test_a_changed_byte_does_not_crash_who_connects",
            "tests/wire/transports/test_nixl_metadata.py::"
            "test_bad_metadata_under_a_good_name_does_not_lock_the_good_one_out",
        ),
        ("nixl-tcp",),
    ),
    "a segment that is cut short kills nobody": Row(
        holds_in(
            "tests/wire/transports/test_shm_segments.py::"
            "test_a_peer_cannot_truncate_what_it_has_shared",
            "tests/wire/transports/test_shm_segments.py::"
            "test_a_reader_cannot_truncate_what_it_was_given",
            "tests/wire/transports/test_shm_segments.py::test_forged_descriptors_are_refused",
        ),
        ("shm",),
    ),
    "files cut short, full or linked elsewhere": Row(
        holds_in("tests/tier/test_disk_faults.py"),
        _DISK,
    ),
}
LABELS = sorted({label for row in CLAIMS.values() for label in row.over})


def wire_of(label: str) -> Wire:
    """The transport of a label; one of no name where something else is attacked."""
    return WIRES.get(label, Wire(label, ""))


def main(label: str, claim: str, tries: str, tokens: str, seed: str) -> None:
    """Try one claim, and print what came of it, after each try and at the end."""
    faulthandler.enable()
    logging.getLogger("kvatlas").setLevel(logging.CRITICAL)

    def said(outcome: Outcome, over: bool = False) -> None:
        print(f"\n{MARK}{json.dumps(outcome.as_json() | {'over': over})}", flush=True)

    attack = Attack(wire_of(label), int(tries), int(tokens), int(seed), said)
    said(CLAIMS[claim].claim(attack), over=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
