"""Bytes and damaged blocks of the data plane in the metrics of a step."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from rl_protocol.ports.data_plane import PlaneStats
from rl_trainer.driver.plane.moved_bytes import MovedBytes


def test_each_step_counts_what_came_since_the_step_before():
    totals = [
        PlaneStats(rows={}, bytes_used=0, bytes_capacity=0, links={"loopback": 10}),
        PlaneStats(rows={}, bytes_used=0, bytes_capacity=0, links={"loopback": 15, "network": 4}, damaged=2),
        PlaneStats(rows={}, bytes_used=0, bytes_capacity=0, links={"loopback": 15, "network": 4}, damaged=2),
    ]

    async def stats() -> PlaneStats:
        return totals.pop(0)

    plane: Any = SimpleNamespace(stats=stats)
    moved = MovedBytes(plane)
    assert asyncio.run(moved.read()) == {"transfer_queue/bytes_loopback": 10}
    assert asyncio.run(moved.read()) == {
        "transfer_queue/bytes_loopback": 5,
        "transfer_queue/bytes_network": 4,
        "transfer_queue/damaged_blocks": 2,
    }
    assert asyncio.run(moved.read()) == {"transfer_queue/bytes_loopback": 0, "transfer_queue/bytes_network": 0}
