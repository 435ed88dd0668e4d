"""The command of the raylet of a run, which starts our programs for agents and workers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ray._private.services import RAYLET_EXECUTABLE
from ray._private.workers import default_worker

from rl_app_ppo.cluster.local import fork_client, idle_agent

_ISOLATED = (sys.executable, "-I", "-S")
"""A program of the standard library alone starts in 20 ms."""

_DASHBOARD_AGENT = ("dashboard_agent_listen_port", "metrics_agent_port", "metrics_export_port")
_RUNTIME_ENV_AGENT = ("runtime_env_agent_port",)
"""The services of Ray's agents, as the raylet names the files of their ports."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """Addresses, folders and names that Ray's Node has chosen."""

    ip: str
    gcs_address: str
    cluster_id: str
    node_id: str
    name: str
    temp_dir: str
    folder: str
    logs: str
    resources: str
    raylet_socket: str
    store_socket: str


@dataclass(frozen=True, kw_only=True)
class Store:
    """Ray's object store."""

    num_bytes: int
    folder: str
    fallback: str


def raylet_command(session: Session, store: Store, resources: Mapping[str, float], fork_socket: Path) -> list[str]:
    """The command that `ray._private.services.start_raylet` runs, with other agents and workers.

    Args:
        session: of Ray.
        store: its object store.
        resources: name -> amount.
        fork_socket: where a ForkServer listens.
    """
    options = {
        "raylet_socket_name": session.raylet_socket,
        "store_socket_name": session.store_socket,
        "object_manager_port": 0,
        "min_worker_port": 0,
        "max_worker_port": 0,
        "node_manager_port": 0,
        "node_id": session.node_id,
        "node_ip_address": session.ip,
        "maximum_startup_concurrency": max(1, int(resources.get("CPU", 1))),
        "static_resource_list": ",".join(f"{name},{amount}" for name, amount in resources.items()),
        "python_worker_command": _worker(session, fork_socket),
        "temp_dir": session.temp_dir,
        "session_dir": session.folder,
        "log_dir": session.logs,
        "resource_dir": session.resources,
        "metrics-agent-port": 0,
        "metrics_export_port": 0,
        "runtime_env_agent_port": 0,
        "object_store_memory": store.num_bytes,
        "plasma_directory": store.folder,
        "fallback_directory": store.fallback,
        "ray-debugger-external": 0,
        "gcs-address": session.gcs_address,
        "session-name": session.name,
        "labels": "",
        "cluster-id": session.cluster_id,
        "num_prestart_python_workers": 0,
        "dashboard_agent_command": _agent(session, _DASHBOARD_AGENT),
        "runtime_env_agent_command": _agent(session, _RUNTIME_ENV_AGENT),
    }
    return [RAYLET_EXECUTABLE, *(f"--{name}={value}" for name, value in options.items()), "--head"]


def _agent(session: Session, services: Sequence[str]) -> str:
    return subprocess.list2cmdline([*_ISOLATED, idle_agent.__file__, session.folder, session.node_id, *services])


def _worker(session: Session, fork_socket: Path) -> str:
    """The raylet replaces the placeholders."""
    options = {
        "node-ip-address": session.ip,
        "node-manager-port": "RAY_NODE_MANAGER_PORT_PLACEHOLDER",
        "object-store-name": session.store_socket,
        "raylet-name": session.raylet_socket,
        "redis-address": None,
        "metrics-agent-port": 0,
        "runtime-env-agent-port": 0,
        "gcs-address": session.gcs_address,
        "session-name": session.name,
        "temp-dir": session.temp_dir,
        "webui": None,
        "cluster-id": session.cluster_id,
    }
    worker = [default_worker.__file__, *(f"--{name}={value}" for name, value in options.items())]
    command = [*_ISOLATED, fork_client.__file__, str(fork_socket), *worker, "RAY_WORKER_DYNAMIC_OPTION_PLACEHOLDER"]
    return subprocess.list2cmdline(command)
