"""Servers of a plane as threads."""

from __future__ import annotations

import threading

import pytest

from rl_protocol import PlaneLostError
from rl_transferqueue import TransferQueueConfig, start_local_plane
from rl_transferqueue.launch import server_process, server_threads
from rl_transferqueue.launch.server_specs import Ready


def test_servers_that_are_not_up_in_time_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ends, end, ready = threading.Event(), server_threads._Threads.end, server_process.ready

    def end_all(threads: server_threads._Threads) -> None:
        ends.set()
        end(threads)

    def late(role: server_process.Role, endpoints: server_process.Endpoints) -> Ready:
        ends.wait(60)
        return ready(role, endpoints)

    monkeypatch.setattr(server_threads, "_START_S", 0.01)
    monkeypatch.setattr(server_threads._Threads, "end", end_all)
    monkeypatch.setattr(server_process, "ready", late)
    before = set(threading.enumerate())
    with pytest.raises(PlaneLostError, match=r"was not up within 0\.01 s"):
        start_local_plane(TransferQueueConfig(backend="memory", capacity_mb=8))
    assert set(threading.enumerate()) <= before
