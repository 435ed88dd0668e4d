"""Helpers for tests of planes whose controller is killed and has a successor."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np

from rl_protocol import BatchData, dense
from rl_transferqueue import LocalPlane

START_S = 120.0


def numbers(*values: int) -> BatchData:
    return BatchData({"x": dense(np.array(values))})


async def restart(plane: LocalPlane) -> None:
    """Kill the controller, and start its successor."""
    os.kill(plane.pids[0], signal.SIGKILL)
    await asyncio.to_thread(plane.restart_controller, start_timeout_s=START_S)
