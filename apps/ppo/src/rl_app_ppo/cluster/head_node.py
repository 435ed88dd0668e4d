"""The servers of a Ray that runs on this machine for one run: GCS server and raylet."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ray._private.node import Node
from ray._private.parameter import RayParams

OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum is 75 MiB; batches do not pass through the object store


class _HeadNode(Node):
    """A head node without dashboard, autoscaler and log monitor.

    ray.init starts these three, waits for the dashboard also with include_dashboard=False, and has
    no argument against the others. They take half of the time of its start, and a run uses none.

    Args:
        folder: Ray's folder for sockets and logs.

    Attributes:
        gcs_address: what ray.init(address=...) connects to.
    """

    def __init__(self, folder: Path) -> None:
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

    def stop(self) -> None:
        """End the processes that have started."""
        self.kill_all_processes(check_alive=False, allow_graceful=True)


@contextmanager
def head_node(folder: Path) -> Generator[str]:
    """Start the servers; yields their address, and stops them on exit."""
    node = _HeadNode(folder)
    try:
        yield node.gcs_address
    finally:
        node.stop()
