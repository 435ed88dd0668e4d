"""The servers of a Ray that runs on this machine for one run: GCS server and raylet."""

from __future__ import annotations

import subprocess
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._private.ray_constants import PROCESS_TYPE_RAYLET
from ray._private.services import start_ray_process

from rl_app_ppo.cluster.local.raylet_command import Session, Store, raylet_command

_start_process: Any = start_ray_process
OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum is 75 MiB; batches do not pass through the object store


class _HeadNode(Node):
    """A head node without dashboard, agents, autoscaler and log monitor.

    ray.init starts them all, waits for the dashboard also with include_dashboard=False, and has no
    argument against the others. They take most of the time of its start, and a run uses none.

    Args:
        folder: Ray's folder for sockets and logs.
        fork_socket: where a ForkServer listens.

    Attributes:
        gcs_address: what ray.init(address=...) connects to.
    """

    def __init__(self, folder: Path, fork_socket: Path) -> None:
        self._fork_socket = fork_socket
        params = RayParams(
            temp_dir=str(folder),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            include_log_monitor="",  # not None, for which Ray puts True
            no_monitor=True,
        )
        with ExitStack() as stack:
            stack.callback(self.stop)
            super().__init__(ray_params=params, head=True, shutdown_at_exit=False, ray_init_cluster=True)
            stack.pop_all()

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """Start no dashboard; Node calls this unconditionally."""

    def start_raylet(
        self,
        plasma_directory: str,
        fallback_directory: str,
        object_store_memory: int,
        use_valgrind: bool = False,  # noqa: ARG002 - Ray's parameter
        use_profiler: bool = False,  # noqa: ARG002 - the same
    ) -> None:
        """Start the raylet with our programs for agents and workers."""
        node: Any = self  # Ray's annotations of these are incomplete
        session = Session(
            ip=node.node_ip_address,
            gcs_address=node.gcs_address,
            cluster_id=node.cluster_id.hex(),
            node_id=node.node_id,
            name=node.session_name,
            temp_dir=node.temp_dir,
            folder=node.get_session_dir_path(),
            logs=node.get_logs_dir_path(),
            resources=node.get_runtime_env_dir_path(),
            raylet_socket=node.raylet_socket_name,
            store_socket=node.plasma_store_socket_name,
        )
        store = Store(num_bytes=object_store_memory, folder=plasma_directory, fallback=fallback_directory)
        resources = node.get_resource_and_label_spec().to_resource_dict()
        out, err = node.get_log_file_names(PROCESS_TYPE_RAYLET, unique=True)
        process = _start_process(
            [
                *raylet_command(session, store, resources, self._fork_socket),
                f"--stdout_filepath={out}",
                f"--stderr_filepath={err}",
            ],
            PROCESS_TYPE_RAYLET,
            fate_share=node.kernel_fate_share,
            stdout_file=subprocess.DEVNULL,
            stderr_file=subprocess.DEVNULL,
        )
        node.all_processes[PROCESS_TYPE_RAYLET] = [process]

    def stop(self) -> None:
        """End the processes that have started."""
        self.kill_all_processes(check_alive=False, allow_graceful=True)


@contextmanager
def head_node(folder: Path, fork_socket: Path) -> Generator[str]:
    """Start the servers; yields their address, and stops them on exit."""
    node = _HeadNode(folder, fork_socket)
    try:
        yield node.gcs_address
    finally:
        node.stop()
