"""The server's side of links from other hosts: a ZeroMQ ROUTER socket with bounded backlogs."""

from __future__ import annotations

import errno
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import zmq

from rl_transferqueue.transport.addresses import endpoint
from rl_transferqueue.transport.connection_limits import Limits, Stall
from rl_transferqueue.transport.event_loop import Reactor
from rl_transferqueue.transport.plane_secret import PlaneKey
from rl_transferqueue.transport.zmq_link import link_identity, session_of
from rl_transferqueue.wire.messages import MAX_FRAME

log = logging.getLogger(__name__)

_BURST = 64
"""Frames read in a row before timers and other sources get a turn."""
_ANSWERS = 32
"""Answers that ZeroMQ itself may hold for one client; fewer cost small answers half their rate."""
_LARGE = 1 << 20
"""Of answers from this size on ZeroMQ holds one at a time for one client."""
_REQUESTS = 64
"""Requests that ZeroMQ itself may hold of one client."""
_FIRST_RETRY_S = 0.5e-3
_LAST_RETRY_S = 0.05
"""ZeroMQ does not signal when it can take more for a client, so sending is retried with back-off.
"""


class _Backlog:
    """Of a client that does not read: unsent answers, and requests that are handled after them."""

    def __init__(self, limits: Limits) -> None:
        self.answers: deque[bytes] = deque()
        self.requests: deque[bytes] = deque()
        self.nbytes = 0
        self.overflowed = False
        """Its session is about to end: too much waits for it."""
        self.stall = Stall(limits, time.monotonic())


class ZmqRouter:
    """Reads requests of all clients of other hosts, and sends answers by session.

    ZeroMQ reconnects a client whose connection ends, so `on_end` is called only for a client that
    stalls (see `Limits`).
    """

    def __init__(
        self,
        reactor: Reactor,
        host: str,
        port: int,
        key: PlaneKey,
        on_frame: Callable[[bytes, bytes], None],
        on_end: Callable[[bytes], None],
        limits: Limits,
        incarnation: int = 0,
    ) -> None:
        """`incarnation` is that of this controller: frames for another one are dropped. 0: this
        server is no controller."""
        self._reactor = reactor
        self._incarnation = incarnation
        self._on_frame = on_frame
        self._on_end = on_end
        self._limits = limits
        self._backlogs: dict[bytes, _Backlog] = {}
        self._large: dict[bytes, zmq.MessageTracker] = {}
        """The last large answers, by session."""
        self._retry_s = _FIRST_RETRY_S
        self._retrying = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        router = self._socket = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full queue is an error, not a lost answer
        router.setsockopt(zmq.SNDHWM, _ANSWERS)
        router.setsockopt(zmq.RCVHWM, _REQUESTS)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.HANDSHAKE_IVL, int(limits.handshake_s * 1e3))
        later_ms = int(
            2e3 * limits.stall_s
        )  # ZeroMQ ends connections silently, so later than we do; this frees its queues
        router.setsockopt(zmq.HEARTBEAT_IVL, int(limits.warn_s * 1e3))
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, later_ms)
        router.setsockopt(zmq.TCP_MAXRT, later_ms)
        key.protect_server(router)
        router.setsockopt(zmq.IPV6, int(":" in host))
        router.bind(f"tcp://{endpoint(host, port or '*')}")
        reactor.watch(router, self._read)

    @property
    def endpoint(self) -> str:
        """Where clients connect."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, session: bytes, frame: bytes) -> None:
        """Send an answer, now or once the client has read earlier ones; dropped if the client is
        gone."""
        backlog = self._backlogs.get(session)
        if backlog is None:
            if self._sent(session, frame) is not False:
                return
            backlog = self._backlogs[session] = _Backlog(self._limits)
            self._retry_s = _FIRST_RETRY_S
            self._retry_later()
        self._grow(session, backlog, backlog.answers, frame)

    def close(self) -> None:
        """Close the socket; unsent answers are dropped."""
        self._backlogs.clear()
        self._large.clear()
        self._socket.close()
        self._context.term()

    def _read(self) -> None:
        for _ in range(_BURST):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            session = session_of(identity, self._incarnation)
            if session is None:
                log.info("a frame of link %s, meant for another controller, is dropped", identity.hex())
                continue
            frame = frames[0] if len(frames) == 1 else b""
            backlog = self._backlogs.get(session)
            if backlog is None:
                self._on_frame(session, frame)
            else:
                self._grow(session, backlog, backlog.requests, frame)

    def _grow(self, session: bytes, backlog: _Backlog, frames: deque[bytes], frame: bytes) -> None:
        """Add a frame that waits. Too much of it ends the session, but not at once: who sends may
        be in the middle of answering several callers."""
        if backlog.overflowed:
            return
        frames.append(frame)
        backlog.nbytes += len(frame)
        if backlog.nbytes > self._limits.queue_bytes:
            backlog.overflowed = True
            why = f"{backlog.nbytes} bytes wait for it; the limit is {self._limits.queue_bytes}"
            self._reactor.call_later(0.0, partial(self._end, session, why))

    def _sent(self, session: bytes, frame: bytes) -> bool | None:
        """Whether it was sent; None: the client is not connected."""
        identity = link_identity(session, self._incarnation)
        sent = self._sent_to(identity, session, frame)
        return self._sent_to(session, session, frame) if sent is None and identity != session else sent

    def _sent_to(self, identity: bytes, session: bytes, frame: bytes) -> bool | None:
        """Whether it was sent to this link of the session; None: the link is not connected."""
        try:
            if len(frame) < _LARGE:
                self._socket.send_multipart([identity, frame], zmq.DONTWAIT)
                return True
            self._large = {who: last for who, last in self._large.items() if not last.done}
            if session in self._large:
                return False
            tracker = self._socket.send_multipart([identity, frame], zmq.DONTWAIT, copy=False, track=True)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return None
        assert tracker is not None
        self._large[session] = tracker
        return True

    # -- clients that do not read
    def _retry_later(self) -> None:
        if not self._retrying:
            self._retrying = True
            self._reactor.call_later(self._retry_s, self._retry)

    def _retry(self) -> None:
        self._retrying = False
        moved = False
        for session, backlog in list(self._backlogs.items()):
            moved |= self._drain(session, backlog)
        if self._backlogs:
            self._retry_s = _FIRST_RETRY_S if moved else min(2 * self._retry_s, _LAST_RETRY_S)
            self._retry_later()

    def _drain(self, session: bytes, backlog: _Backlog) -> bool:
        """Send answers and handle requests as far as possible; returns whether any were."""
        moved = False
        while self._backlogs.get(session) is backlog and not backlog.overflowed:
            if backlog.answers:
                sent = self._sent(session, backlog.answers[0])
                if sent is None:
                    self._end(session, f"its connection has ended, and {backlog.nbytes} bytes waited for it")
                if not sent:
                    break
                backlog.nbytes -= len(backlog.answers.popleft())
            elif backlog.requests:
                frame = backlog.requests.popleft()
                backlog.nbytes -= len(frame)
                self._on_frame(session, frame)
            else:
                del self._backlogs[session]
            moved = True
        if moved:
            backlog.stall.moved(time.monotonic())
        elif session in self._backlogs:
            self._check(session, backlog)
        return moved

    def _check(self, session: bytes, backlog: _Backlog) -> None:
        due = backlog.stall.due(time.monotonic())
        if due == "end":
            self._end(session, f"{backlog.nbytes} bytes wait for it, for {self._limits.stall_s:g} s")
        elif due == "warn":
            log.warning(
                "session %s of another host stalls: %d bytes wait to be sent to it", session.hex(), backlog.nbytes
            )

    def _end(self, session: bytes, why: str) -> None:
        if self._backlogs.pop(session, None) is not None:
            log.warning("session %s of another host is ended: %s", session.hex(), why)
            self._on_end(session)
