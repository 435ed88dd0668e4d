"""Find the successor of a controller that has ended, from another host: it has the same address."""

from __future__ import annotations

import asyncio
import os

from rl_protocol.errors import OutputError, PlaneLostError, PlaneTimeout
from rl_transferqueue.client.deadline import seconds_until
from rl_transferqueue.client.server_watch import CONTROLLER
from rl_transferqueue.transport.bulk_protocol import SESSION_BYTES
from rl_transferqueue.transport.control_client import ControlClient
from rl_transferqueue.transport.plane_secret import PlaneKey
from rl_transferqueue.transport.zmq_link import ZmqLink
from rl_transferqueue.wire.descriptor import PlaneDescriptor
from rl_transferqueue.wire.messages import FindController, FoundController

_POLL_S = 0.02
_ASK_S = 1.0
"""Seconds until the question is repeated: a controller that ends takes it with it."""


async def ask_for_successor(descriptor: PlaneDescriptor, key: PlaneKey, deadline: float) -> PlaneDescriptor:
    """The plane's descriptor with a later controller than in `descriptor`, once it serves.

    Args:
        descriptor: of the plane as it was.
        key: that of the plane.
        deadline: of the wait.

    Raises:
        PlaneLostError: the plane has ended, has no later controller at the deadline, or the earlier
            one still runs.
    """
    link = ZmqLink(descriptor.controller.control, b"\x01" + os.urandom(SESSION_BYTES - 1), key)
    controller = ControlClient(asyncio.get_running_loop(), link, CONTROLLER)
    try:
        while True:
            found = await _ask(controller, min(_ASK_S, seconds_until(deadline)))
            if found is not None and found.incarnation == descriptor.controller.incarnation:
                raise PlaneLostError(
                    "The connection to the controller of the data plane has ended, but the controller runs; its log, or the network, says "
                    "why. Connect again."
                )
            if found is not None and found.plane.controller.incarnation > descriptor.controller.incarnation:
                return found.plane
            if not seconds_until(deadline):
                raise PlaneLostError(
                    f"The controller of the data plane has ended or can't be reached any more, and no successor was there within "
                    f"{descriptor.successor_s:g} s."
                )
            await asyncio.sleep(_POLL_S)
    finally:
        controller.close()


async def _ask(controller: ControlClient, timeout_s: float) -> FoundController | None:
    """What the controller at the address answers; None: it does not answer."""
    try:
        return await controller.call(FindController(), FoundController, timeout_s)
    except PlaneTimeout:
        return None
    except OutputError as error:
        raise PlaneLostError(f"The data plane has ended: {error.message}") from error
