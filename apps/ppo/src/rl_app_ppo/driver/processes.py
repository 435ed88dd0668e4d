"""The processes that a run or a replay starts: the data plane, Ray and the workers."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

from rl_app_ppo.cluster.heartbeats import Watched
from rl_app_ppo.cluster.host_processes import HostProcesses
from rl_app_ppo.cluster.local.fork_server import ForkServer
from rl_app_ppo.cluster.lost_processes import GCS_SERVER, ended_with, named_losses, ray_servers
from rl_app_ppo.cluster.ray_session import ray_session
from rl_app_ppo.config.hosts import units_join
from rl_app_ppo.config.model_path import given_model
from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.demo.cache import read_facts
from rl_app_ppo.driver.adapter_conversion import convert_adapter
from rl_app_ppo.driver.controller_watch import CONTROLLER, controller_watch, successor_s
from rl_app_ppo.driver.heartbeat_watch import heartbeat_watch
from rl_app_ppo.driver.restart_policy import RestartPolicy
from rl_app_ppo.driver.workers import WorkerPool
from rl_app_ppo.inputs.demo_model import cached_demo_model
from rl_app_ppo.inputs.input_files import InputFiles
from rl_app_ppo.outputs.console import Screen
from rl_app_ppo.outputs.run_folder import RunFiles
from rl_app_ppo.outputs.run_journal import plane_settings, require_own_rows
from rl_app_ppo.outputs.startup_times import Startup
from rl_ckpt_engine import PluginPolicy
from rl_protocol.counted import counted
from rl_protocol.support.temporary_folders import temporary_folder
from rl_transferqueue import LocalPlane, start_local_plane


@dataclass(frozen=True, kw_only=True)
class ProcessPlan:
    """What processes are started from."""

    config: AppConfig
    files: RunFiles
    """Where they write."""
    plugins: PluginPolicy
    """Which plug-ins of the weight synchronization the operator allows."""
    fork_server: ForkServer | None
    """Forks the workers of a Ray on this machine; None: with ray.address=ADDRESS."""
    restarts: RestartPolicy | None
    """Counts the new processes of workers and of the controller; None: there are none."""
    inputs: InputFiles
    """The files that the run reads."""
    nodes_s: float = 0.0
    """Seconds to wait until enough nodes are in the Ray cluster."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """The processes, with their models loaded."""

    plane: LocalPlane
    pool: WorkerPool
    ray_servers: Mapping[int, str]
    """Those of Ray on this host: process id -> description."""
    servers: Mapping[int, str]
    """The same, with those of the data plane."""


async def start_processes(plan: ProcessPlan, stack: AsyncExitStack, screen: Screen, startup: Startup) -> Started:
    """Start the processes and load their models; `stack` stops them.

    Raises:
        ConfigError: there is no room for them, or the adapter to start from can't be converted.
        RLError: one does not start.
    """
    await convert_adapter(plan.config, plan.files, screen, startup)
    plane = await _start_servers(plan, stack, screen, startup)
    of_ray = ray_servers()
    servers = _plane_servers(plane, plan.config) | of_ray
    pool = WorkerPool(plan.config, plan.files)
    stack.enter_context(named_losses(lambda: servers, pool.hung))
    # the run goes on without it, and Ray ends this process a minute later
    gcs = {pid: what for pid, what in of_ray.items() if what == GCS_SERVER}
    await stack.enter_async_context(ended_with(gcs))
    await pool.require_resources(screen.note, plan.nodes_s)
    stack.enter_context(closing(pool))
    pool.start()
    hosts = stack.enter_context(closing(HostProcesses()))
    if plan.restarts is not None and plane.descriptor.successor_s:
        await stack.enter_async_context(controller_watch(plane, servers, plan.restarts, pool.hung, screen.note))

    def watched() -> list[Watched]:
        beating = [Watched(servers.get(pid, CONTROLLER), pid, file) for pid, file in plane.heartbeats.items()]
        return [*beating, *hosts.units, *pool.heartbeats()]

    heartbeat_s = plan.config.restart.heartbeat_s
    await stack.enter_async_context(heartbeat_watch(heartbeat_s, watched, hosts, pool.hung, screen.note))
    sockets = stack.enter_context(temporary_folder("rl-app-ppo-"))
    with named_losses(pool.worker_pids, pool.hung, deaths_named=True):
        await _load_models(plan, pool, hosts, plane, sockets, screen, startup)
    return Started(plane=plane, pool=pool, ray_servers=of_ray, servers=servers)


async def _start_servers(plan: ProcessPlan, stack: AsyncExitStack, screen: Screen, startup: Startup) -> LocalPlane:
    """Start the data plane and Ray side by side; `stack` stops them."""
    config = plan.config

    async def start_plane() -> LocalPlane:
        with startup.phase("data_plane", "starting the data plane"):
            return await stack.enter_async_context(_local_plane(plan, screen))

    plane = asyncio.create_task(start_plane())
    try:
        with startup.phase("ray", "starting Ray"):
            await stack.enter_async_context(ray_session(config.ray, config.trainer, plan.fork_server))
    finally:  # an error of the plane must not replace an interrupt, which may have ended its processes
        await asyncio.gather(plane, return_exceptions=True)
    return await plane


async def _load_models(
    plan: ProcessPlan,
    pool: WorkerPool,
    hosts: HostProcesses,
    plane: LocalPlane,
    sockets: Path,
    screen: Screen,
    startup: Startup,
) -> None:
    """Wait for the processes and load their models."""
    model_path = given_model(plan.config) or await _demo_model(plan.config, pool, screen, startup)
    with startup.phase("workers", f"starting {len(pool)} worker processes"):
        await pool.ready(sockets)
        if (others := pool.other_hosts()) and units_join(plane.settings):
            joining = await hosts.start_units(plane.settings, others, plan.files.logs, plan.config.ray.start_timeout_s)
            await asyncio.to_thread(plane.join, joining)
            screen.note(
                f"data plane: {counted(plane.settings.num_storage_units, 'storage unit')} on each of {len(others) + 1} hosts"
            )
    with startup.phase("models", "workers load their models"):
        await pool.build(model_path, plane.descriptor, plan.plugins, plan.inputs.data)


async def _demo_model(config: AppConfig, pool: WorkerPool, screen: Screen, startup: Startup) -> Path:
    """Find the demo's base model in the cache, or make it; returns its folder."""
    path, how = cached_demo_model(config), "from the cache, no warm-up"
    if path is None:
        began = time.perf_counter()
        with startup.phase("base_model", "making the demo's base model"):
            path = await pool.make_demo_model(screen, startup)
        how = f"supervised warm-up took {time.perf_counter() - began:.0f} s with the start of the workers"
    screen.note(f"base model: {how}; accuracy {read_facts(path)['accuracy']:.3f} ({path})")
    return path


@asynccontextmanager
async def _local_plane(plan: ProcessPlan, screen: Screen) -> AsyncGenerator[LocalPlane]:
    settings = plane_settings(plan.config, plan.files)
    nodes = plan.config.trainer.nnodes
    hosts = nodes + 1 if nodes > 1 else 1  # the driver's may have no workers
    wait_s = successor_s(settings, plan.restarts)
    plane = await asyncio.to_thread(
        start_local_plane, settings, log_dir=plan.files.logs, hosts=hosts, successor_s=wait_s
    )
    if control := plane.descriptor.controller.control:
        screen.note(f"data plane: listens at {control}")
    try:
        require_own_rows(settings, plane.recovery, resumes=plan.config.trainer.resume_mode != "disable")
        yield plane
    finally:
        await asyncio.to_thread(plane.close)


def _plane_servers(plane: LocalPlane, config: AppConfig) -> dict[int, str]:
    """Process id -> description of the data plane's server processes, with this host if the run has
    several."""
    controller, *units = plane.pids
    where = f" on {socket.gethostname()}" if config.trainer.nnodes > 1 else ""
    names = {controller: CONTROLLER + where}
    names |= {pid: f"Storage unit {i} of the data plane{where}" for i, pid in enumerate(units)}
    return {pid: name for pid, name in names.items() if pid != os.getpid()}  # an in-process plane has none
