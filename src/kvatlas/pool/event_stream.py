"""Publish and subscribe to batches of events over ZeroMQ, in vLLM's protocol.

A publisher sends messages [topic, number, batch] on a PUB socket. With a replay address, it also
has a ROUTER socket: a subscriber sends the number of the first batch that it missed, and receives
that batch and all later ones. Numbers are 8 bytes, big-endian. A replay ends with the number -1.
Messages are neither encrypted nor signed, so publish only to trusted hosts. This module requires
the extra `wire`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from threading import Event, Lock, Thread
from typing import Any, NamedTuple, Self

from kvatlas.errors import AtlasError, Code, MissingExtraError
from kvatlas.geometry.integers import duration
from kvatlas.pool.events import MOST_BYTES, BlockEvent, EventBatch, decode_batch, encode_batch

END = b"\xff" * 8
"""The number that ends a replay."""
KEPT_BYTES = 1 << 28
"""Maximum total size in bytes of the batches that are kept for replays."""
WAITING = 100_000
"""Maximum number of batches queued for a slow subscriber, as in vLLM; more are dropped."""
_MOST_QUEUED = 1000
"""Maximum number of batches queued in a subscriber's socket, ZeroMQ's default."""
_TICK = 100
"""Milliseconds between checks whether the replay thread should stop."""


def _zmq() -> Any:
    try:
        import zmq
    except ModuleNotFoundError:
        raise MissingExtraError("zmq", "wire") from None
    return zmq


class EventPublisher:
    """Sends events to all subscribers. Pass it to a `BlockPool` as `events`.

    >>> with EventPublisher("inproc://events") as publisher:
    ...     publisher([])
    ...     publisher.sent
    1
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay: str | None = None,
        topic: str = "",
        data_parallel_rank: int | None = None,
        kept: int = 10_000,
    ) -> None:
        zmq = _zmq()
        self.topic = topic.encode()
        self.data_parallel_rank = data_parallel_rank
        self.sent = 0
        """Number of batches sent so far, and the number of the next batch."""
        self._lock = Lock()  # protects the PUB socket, `sent` and `_kept`
        self._kept: deque[tuple[int, bytes]] = deque()
        self._most, self._bytes = kept, 0
        self._ended = Event()
        self._publish = _bound(zmq.PUB, endpoint, most=WAITING)
        self.endpoint = _address(self._publish)
        """The publisher's address. If `endpoint` has a wildcard port, it has the actual port."""
        self.replay_endpoint: str | None = None
        self._thread: Thread | None = None
        if replay is not None:
            try:
                router = _bound(zmq.ROUTER, replay, most=kept + 1)
            except AtlasError:
                self._publish.close(linger=0)
                raise
            self.replay_endpoint = _address(router)
            self._thread = Thread(target=self._serve, args=(router,), name="replay", daemon=True)
            self._thread.start()

    def __call__(self, events: Sequence[BlockEvent]) -> None:
        """Send a batch of events with the current time and the next number, unless closed.

        The call never blocks, and does not fail if subscribers are absent or slow.
        """
        batch = EventBatch(time.time(), list(events), self.data_parallel_rank)
        payload = encode_batch(batch)
        with self._lock:
            if self._ended.is_set():
                return
            number, self.sent = self.sent, self.sent + 1
            self._publish.send_multipart([self.topic, _number(number), payload])
            self._kept.append((number, payload))
            self._bytes += len(payload)
            while len(self._kept) > self._most or self._bytes > KEPT_BYTES:
                self._bytes -= len(self._kept.popleft()[1])

    def close(self) -> None:
        """Stop sending. Wait up to one second for the delivery of batches in flight."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            self._publish.close(linger=1000)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- replay -------------------------------------------------------------------------

    def _serve(self, router: Any) -> None:
        try:
            while not self._ended.is_set():
                if router.poll(_TICK):
                    self._answer(router, router.recv_multipart())
        finally:
            router.close(linger=0)

    def _answer(self, router: Any, frames: list[bytes]) -> None:
        """Reply to a replay request with all kept batches from the requested number on.

        Malformed requests are ignored.
        """
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            return
        first = int.from_bytes(frames[2], "big")
        with self._lock:
            again = [(number, payload) for number, payload in self._kept if number >= first]
        answers = [[self.topic, _number(number), payload] for number, payload in again]
        try:
            for answer in [*answers, [b"", END, b""]]:
                router.send_multipart([frames[0], b"", *answer], flags=_zmq().NOBLOCK)
        except _zmq().ZMQError:
            return  # the subscriber is gone or slow; it will request missing batches again


class ReceivedBatch(NamedTuple):
    """A received batch with its number and a flag for missing batches before it."""

    number: int
    batch: EventBatch
    gap: bool
    """Whether earlier batches are lost, or the publisher restarted. If so, discard all state that
    was built from earlier batches."""


class EventSubscriber:
    """Receives batches from a publisher of kvatlas or vLLM, and requests missed batches again.

    Frames, numbers and batches are validated. `read` raises `bad_handshake` for an invalid
    message. Only one thread may call `read`.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay: str | None = None,
        topic: str = "",
        replay_timeout: float = 5.0,
    ) -> None:
        zmq = _zmq()
        if replay is not None:
            _check_address(replay)  # fail now, rather than when the first batch is missing
        self.replay_timeout = duration(replay_timeout)
        """Maximum duration of a replay in seconds."""
        self._replay_endpoint = replay
        self._expected = 0
        self._anew = False
        """Whether the next batch may come from a restarted or another publisher."""
        self._waiting: deque[ReceivedBatch] = deque()
        self._socket = _socket(zmq.SUB)
        self._lost = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        """Receives a message for each lost connection."""
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._lost, zmq.POLLIN)
        try:
            self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
            self._socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
            self._socket.connect(endpoint)
        except (zmq.ZMQError, UnicodeError) as error:
            self.close()
            raise _bad_address(endpoint, error) from None

    def read(self, timeout: float) -> ReceivedBatch | None:
        """Return the next batch in order, or None if none arrives within `timeout` seconds."""
        end = time.monotonic() + duration(timeout)
        while not self._waiting:
            left = max(0.0, end - time.monotonic())
            ready = dict(self._poller.poll(round(left * 1000)))
            if self._lost in ready:
                self._begin_anew()
            elif ready:
                self._receive(self._socket.recv_multipart(), anew=self._anew)
                self._anew = False
            else:
                return None
        return self._waiting.popleft()

    def _begin_anew(self) -> None:
        """Handle a lost connection. The publisher may have restarted in the meantime.

        Batches that are still in the socket may be from before or after the loss, so only the
        latest of them is kept. That batch and the next one that arrives are marked with a gap.
        """
        while self._lost.poll(0):
            self._lost.recv_multipart()
        latest = None
        for _ in range(_MOST_QUEUED):
            if not self._socket.poll(0):
                break
            latest = self._socket.recv_multipart()
        self._anew = True
        if latest is not None:
            self._receive(latest, anew=True)

    def _receive(self, frames: list[bytes], *, anew: bool) -> None:
        """Request the batches that were missed before a received batch, and queue all for `read`.

        With `anew`, the publisher may have restarted, so the batch is marked with a gap.
        """
        number, payload = _checked(frames)
        batch = decode_batch(payload)
        anew |= number < self._expected
        expected = 0 if anew else self._expected
        missing = self._ask_again(expected, number) if number > expected else []
        # The first batch is no gap if its number is 0 or all batches before it are replayed.
        gap = anew
        for one, content in [*missing, (number, batch)]:
            gap |= one != expected
            self._waiting.append(ReceivedBatch(one, content, gap))
            expected, gap = one + 1, False
        self._expected = expected

    def _ask_again(self, first: int, stop: int) -> list[tuple[int, EventBatch]]:
        """Request batches first .. stop - 1; return the available batches, in order."""
        if self._replay_endpoint is None:
            return []
        zmq = _zmq()
        found: list[tuple[int, EventBatch]] = []
        socket = _socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
            socket.set_hwm(0)
            socket.connect(self._replay_endpoint)
            socket.send_multipart([b"", _number(first)])
            end, room = time.monotonic() + self.replay_timeout, KEPT_BYTES
            while (left := end - time.monotonic()) > 0 and socket.poll(round(left * 1000)):
                frames = socket.recv_multipart()
                if frames[2:3] == [END]:
                    break
                number, payload = _checked(frames[1:])
                room -= len(payload)
                if number >= stop or room < 0:
                    break
                if number >= first:
                    found.append((number, decode_batch(payload)))
                    first = number + 1
        except AtlasError:
            return found  # batches after a malformed message count as lost
        except zmq.ZMQError as error:
            raise _bad_address(self._replay_endpoint, error) from None
        finally:
            socket.close(linger=0)
        return found

    def close(self) -> None:
        """Stop listening."""
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._lost.close(linger=0)
        self._socket.close(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _number(number: int) -> bytes:
    return number.to_bytes(8, "big")


def _checked(frames: list[bytes]) -> tuple[int, bytes]:
    """Check a message [topic, number, batch] and return its number and its encoded batch."""
    if len(frames) != 3 or len(frames[1]) != 8 or frames[1][0] & 0x80:
        problem = "An event message must have 3 frames: a topic, an 8-byte number and a batch"
        got = f"{len(frames)} frames of {list(map(len, frames))[:8]} bytes"
        hint = "Use the address at which vLLM 0.32 or kvatlas publishes KV events"
        raise AtlasError(Code.BAD_HANDSHAKE, problem, got=got, hint=hint)
    return int.from_bytes(frames[1], "big"), frames[2]


def _socket(kind: int) -> Any:
    return _zmq().Context.instance().socket(kind)


def _bound(kind: int, endpoint: str, *, most: int) -> Any:
    """Return a bound socket that queues up to `most` messages for each slow peer."""
    zmq, socket = _zmq(), _socket(kind)
    try:
        socket.set_hwm(most)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # raise instead of dropping messages
        socket.bind(endpoint)
    except _zmq().ZMQError as error:
        socket.close(linger=0)
        raise _bad_address(endpoint, error) from None
    return socket


def _address(socket: Any) -> str:
    return str(socket.getsockopt_string(_zmq().LAST_ENDPOINT))


def _check_address(endpoint: str) -> None:
    """Raise an error if ZeroMQ does not accept the address. No connection is made."""
    zmq = _zmq()
    socket = _socket(zmq.DEALER)
    try:
        socket.connect(endpoint)
    except (zmq.ZMQError, UnicodeError) as error:
        raise _bad_address(endpoint, error) from None
    finally:
        socket.close(linger=0)


def _bad_address(endpoint: str, error: Exception) -> AtlasError:
    problem = f"ZeroMQ cannot use this address ({error})"
    hint = "Use an address such as tcp://127.0.0.1:5557"
    return AtlasError(Code.WIRE_FAILED, problem, got=endpoint, hint=hint)
