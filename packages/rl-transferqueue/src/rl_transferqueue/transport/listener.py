"""A listening socket on the event loop."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable

from rl_transferqueue.transport.event_loop import Reactor

log = logging.getLogger(__name__)

_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_PAUSE_S = 0.5
"""Pause after the process or the host ran out of file descriptors or memory."""


class Listener:
    """Calls back with each new connection; pauses when there is no descriptor or memory for one."""

    def __init__(
        self, reactor: Reactor, listening: socket.socket, on_connection: Callable[[socket.socket], None]
    ) -> None:
        self._reactor = reactor
        self._socket = listening
        self._on_connection = on_connection
        self._watched = False
        self._open = True
        listening.setblocking(False)
        self._watch()

    def close(self) -> None:
        """Accept no more; safe to call twice."""
        if self._watched:
            self._reactor.unwatch(self._socket.fileno())
        self._watched = self._open = False
        self._socket.close()

    def _watch(self) -> None:
        if self._open:
            self._watched = True
            self._reactor.watch(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            peer, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError as error:  # the peer has left already, or there is no room
            log.warning("a connection could not be accepted: %s", error)
            if error.errno in _NO_ROOM:
                self._watched = False
                self._reactor.unwatch(self._socket.fileno())
                self._reactor.call_later(_PAUSE_S, self._watch)
            return
        peer.setblocking(False)
        self._on_connection(peer)
