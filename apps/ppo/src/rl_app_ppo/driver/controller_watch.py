"""Replaces the controller of a run's data plane when its process dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Protocol

from rl_app_ppo.cluster.hung_processes import HungProcesses
from rl_app_ppo.cluster.lost_processes import end_of
from rl_app_ppo.driver.background import running
from rl_app_ppo.driver.restart_policy import LONGEST_WAIT_S, RestartLimitError, RestartPolicy
from rl_protocol import PlaneLostError
from rl_transferqueue import TransferQueueConfig

logger = logging.getLogger(__name__)
CONTROLLER = "The controller of the data plane"
_LOOK_S = 0.1
_START_S = 60.0
"""Longest start of a controller, which reads the whole journal."""


class Plane(Protocol):
    """What is watched; see `LocalPlane`."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids; the controller's is the first."""
        ...

    def restart_controller(self, *, start_timeout_s: float) -> object:
        """Start a successor of the controller.

        Raises:
            PlaneLostError: it does not start.
        """
        ...

    def abandon_controller(self) -> None:
        """Start no successor of the controller: calls of clients fail."""
        ...


def successor_s(settings: TransferQueueConfig, policy: RestartPolicy | None) -> float:
    """Seconds that clients wait for a new controller; 0: there will be none.

    Args:
        settings: of the data plane. It needs a journal.
        policy: counts restarts; None: no process is replaced.
    """
    can = settings.durability != "off" and settings.backend == "simple"
    return LONGEST_WAIT_S + 2 * _START_S if can and policy is not None and policy.allows_any else 0.0


@asynccontextmanager
async def controller_watch(
    plane: Plane,
    servers: MutableMapping[int, str],
    policy: RestartPolicy,
    hung: HungProcesses,
    say: Callable[[str], None],
) -> AsyncGenerator[None]:
    """Start a new controller whenever the one of the plane has ended, while the policy allows it.

    Calls of clients wait for it. Once there is no new one, they fail with PlaneLostError.

    Args:
        plane: started with `successor_s` above 0.
        servers: process id -> description of the run's servers; the new controller is added.
        policy: counts the restarts.
        hung: the processes that the run has killed.
        say: prints a line.
    """
    async with running(_watch(plane, servers, policy, hung, say)):
        yield


async def _watch(
    plane: Plane,
    servers: MutableMapping[int, str],
    policy: RestartPolicy,
    hung: HungProcesses,
    say: Callable[[str], None],
) -> None:
    while True:
        pid = plane.pids[0]
        how = await _ended(pid)
        name = servers.get(pid, CONTROLLER)
        if not await _replaced(plane, f"{name} (process {pid}) {hung.end_of(pid) or how}", policy, say):
            plane.abandon_controller()
            return
        servers.pop(pid, None)
        servers[plane.pids[0]] = name
        say(f"data plane: the new controller (process {plane.pids[0]}) serves, with the rows of the journal")


async def _replaced(plane: Plane, lost: str, policy: RestartPolicy, say: Callable[[str], None]) -> bool:
    """Start controllers until one serves; false: the policy allows no other. `lost` says why."""
    while True:
        try:
            restart = policy.next("the data plane's controller")
        except RestartLimitError as error:
            logger.error("%s and is not started again: %s", lost, error)
            say(f"{lost} and is not started again: {error}")
            return False
        logger.warning("%s", lost)
        say(f"{lost}: it alone is started again ({restart})")
        await asyncio.sleep(restart.wait_s)
        try:
            await _restart(plane)
        except PlaneLostError as error:
            logger.warning("%s", error)
            say(str(error))
            lost = f"{CONTROLLER} did not start"
        else:
            return True


async def _ended(pid: int) -> str:
    """Wait for the end of a process; returns how it ended."""
    while True:
        if how := end_of(pid):
            return how
        await asyncio.sleep(_LOOK_S)


async def _restart(plane: Plane) -> None:
    """Start the controller in a thread; if cancelled, wait for it: then the plane can be closed."""
    starting = asyncio.ensure_future(asyncio.to_thread(plane.restart_controller, start_timeout_s=_START_S))
    try:
        await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.wait([starting], timeout=2 * _START_S)
        raise
