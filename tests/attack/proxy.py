"""A TCP proxy in front of a node, which can cut every connection through it."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of no time: closing resets the connection."""


class Proxy:
    """Listens in front of an endpoint that may change, and forwards bytes both ways."""

    def __init__(self) -> None:
        self.target = ""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._socket.getsockname()[1]}"
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> int:
        """Reset all connections; how many there were."""
        with self._lock:
            pairs, self._pairs = self._pairs, set()
        for pair in pairs:
            for end in pair:
                with suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    end.shutdown(socket.SHUT_RD)
                end.close()
        return len(pairs)

    def close(self) -> None:
        self._socket.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._socket.accept()
            except OSError:
                return
            try:
                host, _, port = self.target.removeprefix("tcp://").rpartition(":")
                far = socket.create_connection((host, int(port)), timeout=2)
                far.settimeout(None)
            except (OSError, ValueError):
                near.close()
                continue
            with self._lock:
                self._pairs.add((near, far))
            for ends in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError, ValueError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            gone = {pair for pair in self._pairs if source in pair}
            self._pairs -= gone
        for pair in gone:
            for end in pair:
                end.close()
