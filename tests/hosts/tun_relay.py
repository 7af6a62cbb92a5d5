"""A relay between hosts with delay, loss, partitions and an MTU, for kernels without netem.

Each host has a TUN device. A process reads the packets that a host sends, keeps them for the delay
of their path, and writes them to the device of the host that they are for. The third number of an
address is the index of its host, so a host can take another address at any time.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from tests.hosts import namespaces
from tests.wire.forking import forked

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_PORTS = struct.Struct(">HH")
_LONGEST_PACKET = 1 << 16
_READ_AT_ONCE = 64
"""Packets read from one device before others get their turn."""
_ANSWER_SECONDS = 20.0

Hop = tuple[int, int]
"""The indices of the host that sends and the host that receives."""


@dataclass(frozen=True)
class Path:
    """What happens to packets in one direction between two hosts."""

    delay: float = 0.0
    """Seconds from one host to the other."""
    loss: float = 0.0
    """The share of packets that are dropped, from 0 to 1."""
    blocked: bool = False
    """Whether all packets are dropped."""
    mtu: int = _LONGEST_PACKET
    """The size above which packets are dropped without an ICMP message."""
    ports: tuple[int, ...] = ()
    """The only TCP ports whose packets a firewall lets through; empty for all."""

    def drops(self, packet: bytes) -> bool:
        """Whether a packet is dropped, apart from random loss."""
        if self.blocked or len(packet) > self.mtu:
            return True
        header = 4 * (packet[0] & 15)
        return bool(self.ports) and not set(_PORTS.unpack_from(packet, header)) & set(self.ports)


class TunRelay:
    """The relay's process, from the side of the tests."""

    def __init__(self, namespace: str, devices: Sequence[str]) -> None:
        """Make the devices in a namespace. The caller moves them to the hosts."""
        self._hosts = range(len(devices))
        self._paths = {(a, b): Path() for a in self._hosts for b in self._hosts if a != b}
        self.process, self._pipe = forked(_main, namespace, list(devices))
        self._hear()

    def change(self, *hops: Hop, **changed: Any) -> None:
        """Change the path of some directions, or of all of them."""
        for hop in hops or self._paths:
            self._paths[hop] = replace(self._paths[hop], **changed)
        self._pipe.send(self._paths)
        self._hear()

    def block(self, *hops: Hop) -> None:
        """Drop all packets of some directions, or of all of them."""
        self.change(*hops, blocked=True)

    def isolate(self, host: int) -> None:
        """Drop all packets from and to a host."""
        self.block(*(hop for hop in self._paths if host in hop))

    def heal(self) -> None:
        """Forward packets again."""
        self.change(blocked=False)

    def forwarded(self, hop: Hop) -> int:
        """The bytes that have been forwarded in one direction."""
        self._pipe.send(hop)
        return int(self._hear())

    def close(self) -> None:
        self._pipe.close()
        self.process.join(5)
        self.process.kill()
        self.process.join()

    def _hear(self) -> Any:
        assert self._pipe.poll(_ANSWER_SECONDS), "the relay does not answer"
        return self._pipe.recv()


# -- in its own process -----------------------------------------------------------------------


class _Relay:
    def __init__(self, control: Connection, devices: Sequence[int]) -> None:
        self._control, self._devices = control, devices
        self._hosts = {device: host for host, device in enumerate(devices)}
        self._paths: dict[Hop, Path] = {}
        self._forwarded: dict[Hop, int] = {}
        self._waiting: list[tuple[float, int, Hop, bytes]] = []
        """Packets in flight: when they arrive, in which order they came, and where they go."""
        self._packets = 0
        self._random = random.Random(7)  # noqa: S311

    def run(self) -> None:
        """Forward packets until the tests close the control connection."""
        control = self._control.fileno()
        self._control.send(None)
        while True:
            seconds = None
            if self._waiting:
                seconds = max(0.0, self._waiting[0][0] - time.monotonic())
            readable, _, _ = select.select([control, *self._devices], [], [], seconds)
            if control in readable:
                self._obey()
            for device in self._devices:
                if device in readable:
                    self._read(device)
            self._deliver()

    def _obey(self) -> None:
        order = self._control.recv()  # EOFError ends the process
        if isinstance(order, dict):
            self._paths = order
            self._control.send(None)
        else:
            self._control.send(self._forwarded.get(order, 0))

    def _read(self, device: int) -> None:
        for _ in range(_READ_AT_ONCE):
            try:
                packet = os.read(device, _LONGEST_PACKET)
            except BlockingIOError:
                return
            if packet[0] >> 4 != 4:
                continue  # IPv6 neighbour discovery, which no host needs
            hop = self._hosts[device], packet[18]
            path = self._paths.get(hop)
            if path is not None and not path.drops(packet) and self._random.random() >= path.loss:
                self._packets += 1
                due = time.monotonic() + path.delay
                heapq.heappush(self._waiting, (due, self._packets, hop, packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, hop, packet = heapq.heappop(self._waiting)
            if self._paths[hop].blocked:
                continue  # in flight when the partition began
            try:
                os.write(self._devices[hop[1]], packet)
            except OSError:
                continue  # the host's device is down
            self._forwarded[hop] = self._forwarded.get(hop, 0) + len(packet)


def _open_tun(name: str) -> int:
    """Make a TUN device, which exists as long as its descriptor is open."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def _main(control: Connection, namespace: str, names: Sequence[str]) -> None:
    namespaces.enter(namespace)
    try:
        _Relay(control, [_open_tun(name) for name in names]).run()
    except (EOFError, OSError, KeyboardInterrupt):
        return
