"""Networks of two or three hosts. A host is a network namespace with one device, `eth0`.

All addresses are 10.77.HOST.NUMBER in one subnet, and exist only inside the namespaces.
"""

from __future__ import annotations

from contextlib import suppress

from tests.hosts import namespaces
from tests.hosts.namespaces import run, run_ip
from tests.hosts.tun_relay import TunRelay

DEVICE = "eth0"


class Network:
    """Hosts that reach each other over their devices."""

    def __init__(self, hosts: int, *, mtu: tuple[int, ...] = ()) -> None:
        """`mtu` has the MTU of each host's device, where it is not 1500."""
        self._switch = namespaces.make("switch")
        self.hosts = [namespaces.make(f"host{host}") for host in range(hosts)]
        try:
            self._connect()
            for host, size in zip(range(hosts), mtu or (1500,) * hosts, strict=True):
                self._on(host, "link", "set", DEVICE, "up", "mtu", str(size))
                self._on(host, "address", "add", f"{self.address(host)}/16", "dev", DEVICE)
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        """Give each host its device."""
        raise NotImplementedError

    def _on(self, host: int, *words: str) -> None:
        run_ip("-n", self.hosts[host], *words)

    @staticmethod
    def address(host: int, number: int = 1) -> str:
        """An address of a host. It has the first one, unless `renumber` gave it another."""
        return f"10.77.{host}.{number}"

    def renumber(self, host: int, number: int) -> None:
        """Replace the address of a host."""
        self._on(host, "address", "flush", "dev", DEVICE)
        self._on(host, "address", "add", f"{self.address(host, number)}/16", "dev", DEVICE)

    def limit(self, host: int, rate: str) -> None:
        """Limit what a host sends, for example to "100mbit"."""
        run("tc", "-n", self.hosts[host], *namespaces.tbf(DEVICE, rate))

    def lift_limits(self) -> None:
        """Let all hosts send at full speed again."""
        for name in self.hosts:
            with suppress(OSError):  # it had no limit
                run("tc", "-n", name, "qdisc", "delete", "dev", DEVICE, "root")

    def set_up(self, host: int, *, up: bool) -> None:
        """Set the device of a host up or down."""
        self._on(host, "link", "set", DEVICE, "up" if up else "down")

    def close(self) -> None:
        """Delete the hosts and what connects them."""
        for name in (*self.hosts, self._switch):
            namespaces.delete(name)


class BridgedNetwork(Network):
    """Hosts with veth devices on one bridge: as fast as the machine, with offloads."""

    def _connect(self) -> None:
        switch = ("-n", self._switch)
        run_ip(*switch, "link", "add", "bridge", "type", "bridge")
        run_ip(*switch, "link", "set", "bridge", "up", "mtu", "9000")
        for host, name in enumerate(self.hosts):
            pair = ["type", "veth", "peer", "name", DEVICE, "netns", name]
            run_ip(*switch, "link", "add", f"port{host}", *pair)
            run_ip(*switch, "link", "set", f"port{host}", "master", "bridge", "up", "mtu", "9000")


class RelayedNetwork(Network):
    """Hosts with TUN devices and a relay that delays and drops packets."""

    relay: TunRelay

    def _connect(self) -> None:
        devices = [f"tun{host}" for host in range(len(self.hosts))]
        self.relay = TunRelay(self._switch, devices)
        for device, name in zip(devices, self.hosts, strict=True):
            run_ip("-n", self._switch, "link", "set", device, "netns", name)
            # A queue that is long enough for the relay: loss is what a test asks for, no more.
            run_ip("-n", name, "link", "set", device, "name", DEVICE, "txqueuelen", "10000")
        self.relay.change()

    def lift_limits(self) -> None:
        super().lift_limits()
        self.relay.change(delay=0.0)

    def probe_mtu(self, host: int) -> None:
        """Have a host's TCP search for the MTU of a path that drops packets (RFC 4821)."""
        command = "echo 1 > /proc/sys/net/ipv4/tcp_mtu_probing"
        run_ip("netns", "exec", self.hosts[host], "sh", "-c", command)

    def close(self) -> None:
        if hasattr(self, "relay"):
            self.relay.close()
        super().close()
