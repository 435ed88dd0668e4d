"""Shuts down the connections between two processes of this machine, as a cut network does."""

from __future__ import annotations

import ctypes
import os
import socket

import psutil

_PIDFD_GETFD = 438
"""Number of the system call, on all processors; Python has no function for it."""


def cut_all(pid: int, other: int) -> int:
    """Shut down all TCP connections between two processes, both of which keep running; returns how
    many there were.
    """
    theirs = {tuple(one.laddr) for one in _established(other)}
    between = [one.fd for one in _established(pid) if tuple(one.raddr) in theirs]
    pidfd = os.pidfd_open(pid)
    try:
        for fd in between:
            mine = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, fd, 0)
            if mine < 0:
                raise OSError(ctypes.get_errno(), f"descriptor {fd} of process {pid} can't be taken")
            with socket.socket(fileno=mine) as connection:
                connection.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(pidfd)
    return len(between)


def _established(pid: int) -> list[psutil._common.pconn]:
    return [one for one in psutil.Process(pid).net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED]
