"""Watches the training of a run; see `rl_app_ppo.watchdog`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

from rl_app_ppo.cluster.lost_processes import fate
from rl_app_ppo.cluster.placement import free_cpus
from rl_app_ppo.driver.workers import WorkerPool
from rl_app_ppo.outputs.console import Screen
from rl_app_ppo.outputs.run_folder import RunFiles, writing
from rl_app_ppo.watchdog.report import Observed
from rl_app_ppo.watchdog.watchdog_thread import Watchdog
from rl_protocol import OutputError
from rl_protocol.ports import ReplayBuffer


@asynccontextmanager
async def hang_watch(
    hang_s: float,
    pool: WorkerPool,
    buffers: Mapping[str, ReplayBuffer],
    servers: Mapping[int, str],
    files: RunFiles,
    screen: Screen,
) -> AsyncGenerator[None]:
    """End the work within if nothing moves for `hang_s` seconds, with a report; 0: never.

    The report is printed and written before the work is cancelled, since that may fail, too. If it
    can't be written, the run ends all the same.

    Args:
        hang_s: seconds without progress.
        pool: the worker processes.
        buffers: the replay buffer of each partition.
        servers: names of the data plane's and Ray's processes, by id.
        files: where the report goes.
        screen: prints it.

    Raises:
        HangError: nothing has moved for that long; has the report without the stacks.
    """
    if not hang_s:
        yield
        return
    observed = Observed(
        calls=pool.calls,
        buffers=buffers,
        processes=lambda: {**pool.pids(), **servers},
        fate=lambda pid: pool.hung.end_of(pid) or fate(pid),
        resources=lambda: f"{pool.cpus_needed:g} CPUs are requested from Ray (ray.cpus_per_worker); {free_cpus()}",
        logs=files.logs,
    )
    loop = asyncio.get_running_loop()

    def report() -> str:
        waiting, whole = observed.report(hang_s, loop)
        screen.note(whole)
        try:
            with writing(files.hang):
                files.hang.write_text(whole + "\n", encoding="utf-8")
        except OutputError as error:
            return f"{waiting}\nThe stacks are above; {error}"
        return f"{waiting}\nThe stacks of all processes: {files.hang}"

    async with Watchdog(hang_s, observed.progress, report).watching():
        yield
