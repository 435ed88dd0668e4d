"""Find the successor of a controller that has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from rl_protocol.errors import OutputError, PlaneLostError
from rl_transferqueue.client.deadline import seconds_until
from rl_transferqueue.wire.descriptor import PlaneDescriptor

_POLL_S = 0.02
_END_S = 10.0
"""Longest time from the end of a connection to that of its process, when the process ends."""


async def find_successor(
    descriptor: PlaneDescriptor, deadline: float, still_runs: Callable[[], bool] = lambda: False
) -> PlaneDescriptor:
    """The plane's descriptor with a later controller than in `descriptor`, once it is there.

    Args:
        descriptor: of the plane as it was.
        deadline: of the wait.
        still_runs: whether the earlier controller is not known to have ended.

    Raises:
        PlaneLostError: the plane has ended, has no later controller at the deadline, or the earlier
            one has ended the connection alone.
    """
    incarnation, began = descriptor.controller.incarnation, monotonic()
    while True:
        try:
            found = PlaneDescriptor.load(Path(descriptor.file))
        except OutputError as error:
            raise PlaneLostError(f"The data plane has ended: {error}") from error
        if found.controller.incarnation > incarnation:
            return found
        if still_runs() and monotonic() > began + _END_S:
            raise PlaneLostError("The controller of the data plane has ended the connection; its log says why.")
        if not seconds_until(deadline):
            raise PlaneLostError(
                f"The controller of the data plane has ended, and no successor was there within {descriptor.successor_s:g} s."
            )
        await asyncio.sleep(_POLL_S)
