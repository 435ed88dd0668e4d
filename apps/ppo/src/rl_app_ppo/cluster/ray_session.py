"""Start Ray for one run, or join a cluster.

With ray.address=local the sockets, logs and token of Ray are in a folder of mode 0700.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from functools import cache, partial
from pathlib import Path

import ray
from ray._private import ray_constants

from rl_app_ppo.checks.ray_clusters import RAY_PREFIX, ray_folder
from rl_app_ppo.cluster.environment import compute_settings, environment
from rl_app_ppo.cluster.local.fork_server import ForkServer
from rl_app_ppo.cluster.local.head_node import head_node
from rl_app_ppo.config.schema import LOCAL, RayConfig, TrainerConfig
from rl_protocol import ConfigError, RLError, WorkerError
from rl_protocol.support.disk_writes import write_errors
from rl_protocol.support.temporary_folders import temporary_folder

TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"  # noqa: S105 - the name of a variable
_MISMATCH = "Version mismatch"
"""The begin of Ray's error about a cluster with another version of Ray or Python."""
LATE_S = 10.0
"""Longest wait for a late start of Ray, before its processes are left to the end of ours."""


@contextmanager
def private_folder() -> Generator[Path]:
    """A folder for ray.init(_temp_dir=...), beside the token that Ray requires from callers.

    Ray makes its folder readable to all users, so it lies in one of mode 0700.
    """
    with ExitStack() as stack:
        remedy = "Free some space there, or set RAY_TMPDIR to another local folder."
        with write_errors(ray_folder(), "The folder of Ray", remedy):
            folder = stack.enter_context(temporary_folder(RAY_PREFIX, ray_folder()))
            token = folder / "token"
            with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(_token())
        stack.enter_context(environment({TOKEN_PATH: str(token)}))
        yield folder / "ray"


@cache
def _token() -> str:
    """The token of all sessions of this process: Ray reads it once."""
    return secrets.token_hex(32)


logger = logging.getLogger(__name__)

TASK_EVENTS = "RAY_task_events_report_interval_ms"
"""0: Ray keeps no record of calls. Profiled steps need it for the timeline; it costs time per step.
"""


def write_timeline(path: Path) -> None:
    """Write Ray's timeline of all calls so far, for chrome://tracing and Perfetto.

    Raises:
        OSError: the file can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    ray.timeline(filename=str(path))


def check_ray_is_free(config: RayConfig) -> None:
    """Check that this process can start Ray for a run.

    Raises:
        ConfigError: Ray runs in this process already, or was imported with settings that would make
            it listen on all network interfaces.
    """
    if ray.is_initialized():
        raise ConfigError(
            "Ray runs in this process already, and a run starts and stops its own (ray.address). Call ray.shutdown() before train(), "
            "or train in another process."
        )
    if config.address == LOCAL and ray_constants.ENABLE_RAY_CLUSTER:
        raise ConfigError(
            f"ray was imported before train(), without {ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR}=0, and would listen on all network "
            "interfaces (ray.address=local). Set that environment variable, or import ray after train()."
        )


@asynccontextmanager
async def ray_session(
    config: RayConfig, trainer: TrainerConfig, fork_server: ForkServer | None
) -> AsyncGenerator[None]:
    """Start Ray on this machine or join a cluster, and shut it down or leave it at the end.

    Args:
        config: which Ray.
        trainer: says how many threads compute, and which steps are profiled.
        fork_server: forks the workers of a Ray on this machine; None: join the cluster.

    Raises:
        ConfigError: the cluster runs another version of Ray or Python.
        OutputError: the folder of Ray can't be written.
        WorkerError: Ray did not start in time, or the cluster can't be joined.
    """
    async with AsyncExitStack() as stack:
        stack.enter_context(environment(compute_settings(trainer.threads_per_worker)))  # the workers inherit it
        folder: Path | None = None
        if fork_server is not None:
            if not trainer.profile_steps:
                stack.enter_context(environment({TASK_EVENTS: os.environ.get(TASK_EVENTS, "0")}))
            folder = stack.enter_context(private_folder())
            stack.callback(fork_server.close)  # a worker that is still starting would make the folder again
        ended = threading.Event()
        starting = _in_thread(partial(_start, config.address, folder, fork_server, stack, ended), ended)
        # If it is late or cancelled, stop it once it has started. A call of Ray can't be stopped.
        stack.push_async_callback(partial(asyncio.wait, [starting], timeout=LATE_S))
        stack.callback(ended.set)
        try:
            async with asyncio.timeout(config.start_timeout_s):
                await asyncio.shield(starting)
        except RLError:
            raise
        except Exception as error:  # of any type: Ray also raises Exception itself
            if str(error).startswith(_MISMATCH):
                raise ConfigError(
                    f"The cluster of ray.address={config.address} runs another Ray or Python than this process. "
                    f"{' '.join(str(error).split())} Install the cluster's Ray and Python here, or give the address of another cluster; "
                    f"ray.address={LOCAL} starts Ray on this machine alone."
                ) from error
            why = (
                str(error).rstrip(".") or f"it was not ready within {config.start_timeout_s:g} s (ray.start_timeout_s)"
            )
            raise WorkerError(
                f"Ray did not start ({config.address}): {why}. Stop a stale session with 'ray stop', or set ray.address to a running "
                "cluster."
            ) from error
        if threading.current_thread() is threading.main_thread():
            # Restore our handler: that of Ray prints a stack and aborts the process 3 s later.
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        yield


def _in_thread(work: Callable[[], None], ended: threading.Event) -> asyncio.Future[None]:
    """Run a call that may never return, in a thread that the end of the process does not wait for.

    The thread lives until `ended`: processes of Ray that it starts are killed at its end.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    done.add_done_callback(lambda future: future.cancelled() or future.exception())  # has no reader if it is late

    def finish(error: BaseException | None) -> None:
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:  # noqa: BLE001 - raised by who awaits `done`
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, error)
        ended.wait()

    threading.Thread(target=run, name="start Ray", daemon=True).start()
    return done


def _start(
    address: str,
    folder: Path | None,
    fork_server: ForkServer | None,
    stack: AsyncExitStack,
    ended: threading.Event,
) -> None:
    """Connect to the Ray at an address, or start one in `folder`; `stack` shuts it down.

    After `ended` no caller unwinds `stack`, so Ray is shut down at once.
    """
    if folder is not None and fork_server is not None:
        requests = folder.with_name("fork")
        fork_server.listen(requests)
        address = stack.enter_context(head_node(folder, requests))
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=True)
    if ended.is_set():
        ray.shutdown()
    else:
        stack.callback(ray.shutdown)
