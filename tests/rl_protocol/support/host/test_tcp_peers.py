"""What the kernel is told about a connection."""

from __future__ import annotations

import socket

from rl_protocol.support.host.tcp_peers import DEAD_AFTER_S, expect_reader, notice_dead_peer


def test_a_dead_host_is_noticed_in_time_and_a_slow_reader_is_not_one() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:

        def option(name: int) -> int:
            return connection.getsockopt(socket.IPPROTO_TCP, name)

        notice_dead_peer(connection)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        seconds = option(socket.TCP_KEEPIDLE) + option(socket.TCP_KEEPINTVL) * option(socket.TCP_KEEPCNT)
        assert seconds == DEAD_AFTER_S
        assert option(socket.TCP_USER_TIMEOUT) == 0
        expect_reader(connection)
        assert option(socket.TCP_USER_TIMEOUT) == DEAD_AFTER_S * 1000
