"""A node of the soak: it moves what it is told to, and always knows what its pool must hold.

Its pool has slots of one request each. From some it offers and pushes, what they hold never
changes; into the others requests come. Beside the pool it keeps an image of it, so that a
byte that changes where nothing is under way is noticed whenever it does.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import resource
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from kvatlas import AtlasError
from kvatlas.copying import copy_request
from kvatlas.copying.run_bounds import Bytes
from kvatlas.planning import Plan
from kvatlas.routing import route
from kvatlas.tier import Tier
from kvatlas.wire import Session, make_transport
from kvatlas.wire.transports.shared_memory import create_segment
from tests.attack.left_open import Open, open_things, opened_since
from tests.attack.plans import NODE, Wire, made
from tests.wire.child import Json, Rank, contents
from tests.wire.helpers import waited

SLOT_TOKENS, SLOTS = 128, 8
OWN, LANDING = range(4), range(4, SLOTS)
"""Slots that are read from, and slots that requests come into."""
_RELEASED = 30.0
_CLOSED = 3.0
"""Seconds in which libraries let go of what was closed."""
_LEAKED: list[object] = []
LAYOUTS = [("LBNHC", 16), ("BLNHC", 32), ("LBHNC", 16), ("BHLNC", 32)]


def soak_plan(number: int) -> Plan:
    return made(*LAYOUTS[number % len(LAYOUTS)], SLOT_TOKENS * SLOTS)


def slot_blocks(plan: Plan, slot: int) -> dict[int, list[int]]:
    each = SLOT_TOKENS // plan.block_size
    return {0: list(range((slot + 1) * each - 1, slot * each - 1, -1))}


@lru_cache
def _contents(number: int) -> dict[int, Bytes]:
    return contents(soak_plan(number), number)


def carry(source: int, slot: int, plan: Plan, into: Bytes, landing: int) -> None:
    """A request of another node, put where it belongs without any wire."""
    src = soak_plan(source)
    blocks = {
        "source_blocks": slot_blocks(src, slot),
        "destination_blocks": slot_blocks(plan, landing),
    }
    moved = route(src, plan)
    copy_request(moved, {0: _contents(source)}, {0: {0: into}}, tokens=SLOT_TOKENS, **blocks)


class SoakNode:
    """One node, carrying out orders side by side."""

    def __init__(self, number: int, wire: Wire) -> None:
        self.number, self.plan = number, soak_plan(number)
        self.rank = Rank(self.plan, wire.name, number, SLOT_TOKENS * SLOTS, **NODE)
        self.node = self.rank.node
        self.image = self.rank.pools[0].copy()
        self.masks = {slot: self._mask(slot) for slot in LANDING}
        self.busy: set[int] = set()
        self.lock = threading.Lock()
        self.sessions: dict[int, tuple[str, Session]] = {}
        self.expected: dict[str, Any] = {}

    def _mask(self, slot: int) -> Bytes:
        """Which bytes of the pool are a slot's."""
        ones, mask = np.ones_like(self.image), np.zeros_like(self.image)
        blocks = slot_blocks(self.plan, slot)
        copy_request(
            route(self.plan, self.plan), {0: {0: ones}}, {0: {0: mask}},
            source_blocks=blocks, destination_blocks=blocks, tokens=SLOT_TOKENS,
        )  # fmt: skip
        return mask.astype(bool)

    def landed(self, slot: int, source: int, source_slot: int, *, ready: bool) -> int:
        """A slot is at rest again: it has the request, or whatever it now has. Wrong bytes."""
        pool = self.rank.pools[0]
        with self.lock:
            if ready:
                carry(source, source_slot, self.plan, self.image, slot)
            else:
                np.copyto(self.image, pool, where=self.masks[slot])
            self.busy.discard(slot)
        return self.wrong()

    def wrong(self) -> int:
        """Bytes that have changed where nothing is under way."""
        with self.lock:
            differs = self.rank.pools[0] != self.image
            if differs.any():
                for slot in self.busy:
                    differs &= ~self.masks[slot]
        found = int(differs.sum())
        if found:
            with self.lock:
                np.copyto(self.image, self.rank.pools[0], where=differs)
        return found

    # -- orders ---------------------------------------------------------------------------

    def answer(self, order: Json) -> Json:
        act = getattr(self, f"do_{order['do']}")
        said: Json = act(**order["about"])
        return said

    def do_offer(self, request: str, slot: int, timeout: float) -> Json:
        blocks = slot_blocks(self.plan, slot)
        self.node.offer(request, blocks, SLOT_TOKENS, timeout=timeout)
        return {}

    def do_withdraw(self, request: str) -> Json:
        self.node.withdraw(request)
        return {}

    def do_pull(
        self, request: str, slot: int, source: int, source_slot: int, endpoint: str,
        keep: bool, cancel: float, about: Json,
    ) -> Json:  # fmt: skip
        with self.lock:
            self.busy.add(slot)
        code, released = "ready", True
        try:
            session = self._session(source, endpoint, keep=keep)
            try:
                blocks = slot_blocks(self.plan, slot)
                transfer = session.pull(
                    request, destination_blocks=blocks, tokens=SLOT_TOKENS, **about
                )
                try:
                    if cancel:
                        transfer.wait(cancel)
                        transfer.cancel()
                    transfer.wait()
                except AtlasError as refused:
                    transfer.cancel()
                    code = "ready" if transfer.ready else str((transfer.error or refused).code)
                released = transfer.wait_released(_RELEASED)
            finally:
                if not keep:
                    session.close()
        except AtlasError as refused:
            code = str(refused.code)
        if not released:
            return {"code": code, "wrong": 0, "stuck": 1}
        wrong = self.landed(slot, source, source_slot, ready=code == "ready")
        return {"code": code, "wrong": wrong}

    def do_expect(self, request: str, slot: int, source: int) -> Json:
        with self.lock:
            self.busy.add(slot)
        blocks, src = slot_blocks(self.plan, slot), soak_plan(source)
        about: Json = {"source": src, "pushers": [f"node-{source}"]}
        self.expected[request] = self.node.expect(request, blocks, SLOT_TOKENS, **about)
        return {}

    def do_forget(self, request: str, slot: int, source: int, source_slot: int) -> Json:
        expected = self.expected.pop(request, None)
        ready = expected is not None and expected.ready.is_set()
        self.node.forget(request)
        wrong = self.landed(slot, source, source_slot, ready=ready)
        return {"wrong": wrong, "ready": ready}

    def do_push(
        self, request: str, slot: int, target: int, endpoint: str, keep: bool, about: Json
    ) -> Json:
        try:
            session = self._session(target, endpoint, keep=keep)
            try:
                blocks = slot_blocks(self.plan, slot)
                session.push(request, source_blocks=blocks, tokens=SLOT_TOKENS, **about).wait()
            finally:
                if not keep:
                    session.close()
        except AtlasError as refused:
            return {"code": str(refused.code)}
        return {"code": "ready"}

    def _session(self, peer: int, endpoint: str, *, keep: bool) -> Session:
        if not keep:
            return Session(self.node, [endpoint], timeout=5)
        with self.lock:
            known = self.sessions.get(peer)
        if known is not None and known[0] == endpoint:
            return known[1]
        session = Session(self.node, [endpoint], timeout=5)
        with self.lock:
            old, self.sessions[peer] = self.sessions.get(peer), (endpoint, session)
        if old is not None:
            old[1].close()
        return session

    def do_state(self) -> Json:
        """What is left once nothing is under way, all sessions closed."""
        for _, session in self.sessions.values():
            session.close()
        self.sessions.clear()
        waited(self.rank.idle, 20)
        guards = self.rank.wrong(self.rank.pools)
        return self.rank.left() | {"wrong": self.wrong() + guards}

    def do_leak(self) -> Json:
        """A descriptor and a segment that are never closed, for whoever doubts the soak."""
        _LEAKED.extend([os.dup(1), create_segment(4096)])
        return {}

    def close(self) -> int:
        """Close the node; how many agents of its transport are kept for good."""
        self.rank.close()
        return self.rank.transport.retired


class TierNode:
    """A node that keeps requests in a file on a disk that is full from time to time."""

    def __init__(self, number: int, path: str) -> None:
        self.number, self.plan = number, soak_plan(1)
        self.tier = Tier.open(path, made("BLHNC", 32, SLOT_TOKENS * SLOTS), durable=False)
        self.lock = threading.Lock()

    def _keys(self, source: int, slot: int) -> list[bytes]:
        each = SLOT_TOKENS // self.tier.plan.block_size
        return [f"{source} {slot} {block}".encode() for block in range(each)]

    def do_store(self, source: int, slot: int) -> Json:
        plan = soak_plan(source)
        try:
            self.tier.store(
                _contents(source), plan, blocks=slot_blocks(plan, slot), tokens=SLOT_TOKENS,
                keys=self._keys(source, slot),
            )  # fmt: skip
        except AtlasError as refused:
            return {"code": str(refused.code)}
        return {"code": "ready"}

    def do_fetch(self, source: int, slot: int) -> Json:
        """Whatever the tier says it has must be right."""
        keys, landing = self._keys(source, slot), LANDING[0]
        pool = np.zeros(self.plan.pools[0].nbytes, np.uint8)
        right = pool.copy()
        try:
            tokens = self.tier.match(keys, tokens=SLOT_TOKENS)
            if tokens < SLOT_TOKENS:
                return {"code": "absent"}
            self.tier.fetch(
                {0: pool}, self.plan, blocks=slot_blocks(self.plan, landing), tokens=SLOT_TOKENS,
                keys=keys,
            )  # fmt: skip
        except AtlasError as refused:
            return {"code": str(refused.code)}
        carry(source, slot, self.plan, right, landing)
        return {"code": "ready", "wrong": int((pool != right).sum())}

    def do_disk(self, full: bool) -> Json:
        """No write beyond the first 64 KiB of a file, or all of them."""
        soft = 1 << 16 if full else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))
        return {}

    def do_state(self) -> Json:
        return {"leases": 0, "buffers": 0, "quarantine": 0, "claims": 0, "wrong": 0}

    def close(self) -> int:
        self.tier.close()
        return 0

    def answer(self, order: Json) -> Json:
        with self.lock:
            said: Json = getattr(self, f"do_{order['do']}")(**order["about"])
            return said


def log_of(folder: str, number: int) -> Path:
    return Path(folder, f"node-{number}.log")


def main(told: Connection, number: int, wire: Wire | None, folder: str) -> None:
    """Be a node until nobody tells it anything any more."""
    with log_of(folder, number).open("wb") as log:
        for noisy in (1, 2):  # libraries print what they like
            os.dup2(log.fileno(), noisy)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    logging.getLogger("kvatlas").setLevel(logging.CRITICAL)
    faulthandler.enable()
    if wire is not None:
        os.environ.update(wire.settings)
        make_transport(wire.name).close()  # libraries open some things once, and never close them
    before = open_things()
    retired, last = _carry_out_orders(told, number, wire, folder)
    if last is not None:
        said = _left_open(before) | {"retired": retired, "id": last["id"]}
        told.send_bytes(json.dumps(said).encode())
        _heard(told)  # until nobody wants to know more


def _carry_out_orders(
    told: Connection, number: int, wire: Wire | None, folder: str
) -> tuple[int, Json | None]:
    """Until the last order: how many agents were retired, and that order, if there was one."""
    node = TierNode(number, f"{folder}/tier") if wire is None else SoakNode(number, wire)
    endpoint = "" if isinstance(node, TierNode) else node.node.endpoint
    told.send_bytes(json.dumps({"endpoint": endpoint}).encode())
    sending = threading.Lock()

    def carry_out(order: Json) -> None:
        try:
            said = node.answer(order)
        except Exception as surprise:
            said = {"surprise": f"{type(surprise).__name__}: {surprise}"[:300]}
        with sending:
            told.send_bytes(json.dumps(said | {"id": order["id"]}).encode())

    with ThreadPoolExecutor(16) as workers:
        while (order := _heard(told)) is not None and order["do"] != "end":
            workers.submit(carry_out, order)
    return node.close(), order


def _heard(told: Connection) -> Json | None:
    try:
        order: Json = json.loads(told.recv_bytes())
    except (EOFError, OSError):
        return None
    return order


def _left_open(before: Open) -> Open:
    """What is open once everything was closed, and was not before anything was made."""
    gc.collect()
    waited(lambda: not any(opened_since(before).values()), _CLOSED)
    return opened_since(before)
