"""TCP connections whose end is noticed when the host of the peer is gone."""

from __future__ import annotations

import socket

DEAD_AFTER_S = 5
"""Seconds after which the kernel ends a connection to a host that is gone."""


def notice_dead_peer(connection: socket.socket) -> None:
    """Send small messages immediately, and detect a peer whose host is gone.

    Not by `expect_reader`: a peer may read nothing for a while.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, DEAD_AFTER_S - 1)


def expect_reader(connection: socket.socket) -> None:
    """End the connection also if what was sent is not taken in time.

    Only where little is sent: a peer that is slow to read would look dead.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER_S * 1000)
