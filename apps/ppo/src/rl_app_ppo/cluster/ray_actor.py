"""The driver's handles of a worker process, which is a Ray actor, and of its workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray._private import state
from ray.exceptions import RayActorError, RayTaskError, UnserializableException
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_app_ppo.cluster.heartbeats import OtherHost, Watched
from rl_app_ppo.cluster.hung_processes import HungProcesses
from rl_app_ppo.cluster.lost_processes import ended, ray_servers, unless_ended
from rl_app_ppo.cluster.ray_errors import plain, reason_of
from rl_app_ppo.config.placement import Role
from rl_app_ppo.rank_network import RankNetwork
from rl_app_ppo.watchdog.unanswered_calls import CallLog
from rl_app_ppo.worker.call_socket import CANCELLED, Connection
from rl_app_ppo.worker.messages import WarmupProgress, WorkerPlace
from rl_app_ppo.worker.process import WorkerProcess
from rl_protocol import ConfigError, RLError, WorkerDiedError, WorkerError
from rl_protocol.counted import counted
from rl_protocol.support.host.portable import SOCKET_PATH_LIMIT
from rl_protocol.support.host_identity import this_host
from rl_protocol.support.rendezvous import RendezvousAddress

_log = logging.getLogger(__name__)
_FAILURES = (RayTaskError, RayActorError, UnserializableException, TimeoutError)
_actor_class: Any = ray.remote(WorkerProcess)
_CREATION = "error raised in its creation task"
"""Part of Ray's message about a process that has raised an error at its start."""
_LOOK_S = 1.0
"""Seconds between two looks for a node, which Ray may find in the meantime."""
_START_KEY, _STAGE_KEY = "ray.start_timeout_s", "trainer.stage_timeout_s"
"""The settings of the deadlines of calls."""
_END_S = 5.0
"""How long a process that has closed its connection may live before it is killed."""


class RayProcess:
    """The driver's handle of a WorkerProcess.

    Args:
        roles: roles of its workers.
        name: its name, in messages.
        log_path: its log.
        threads: compute threads; 0: all cores, shared with the processes that compute beside it.
        cpus: CPUs that Ray reserves.
        gpus: GPUs that Ray reserves; the process sees no others.
        lenders: processes of its host that have started, or start; it uses their GPUs, too.
        host: options of Ray that choose its node; None: this node if it has GPUs or lenders, else
            any.
        calls: notes the calls that wait; None: nothing reads them.
        others: which of the processes without which the run can't continue have ended, and how; it
            waits for a start no longer than they live.
        hung: the processes that the run has killed; None: none.
        missing_node: what `host` needs a node for, while the cluster has none; else empty. None: it
            can start on no other node.
        say: prints a line.

    Attributes:
        actor: Ray's handle of the WorkerProcess.
        pid: its process id; 0: it is not ready, or on another host.
        host: its host where that is another one; None: not ready, or on this one.
        end: of a call that ends only with the process, or when Ray loses it; None: not connected.
        memory: see WorkerPlace; empty: not ready.
        network: likewise.
    """

    def __init__(
        self,
        roles: Sequence[Role],
        name: str,
        log_path: Path,
        threads: int,
        *,
        cpus: float = 0.0,
        gpus: int = 0,
        lenders: Sequence[RayProcess] = (),
        calls: CallLog | None = None,
        host: Mapping[str, Any] | None = None,
        others: Callable[[], Sequence[str]] = list[str],
        hung: HungProcesses | None = None,
        missing_node: Callable[[], str] | None = None,
        say: Callable[[str], None] = _log.warning,
    ) -> None:
        self.name = name
        self.pid = 0
        self.host: OtherHost | None = None
        self.memory = self.network = ""
        self.calls = calls or CallLog()
        self.roles = tuple(roles)
        self._log_path = log_path
        self._threads = threads
        self._cpus = cpus
        self._gpus = gpus
        self._lenders = lenders
        self._host = host
        self._address = ""
        """Of the node, in a run on several hosts."""
        self._built: tuple[bytes, float] | None = None
        self._place: WorkerPlace | None = None
        self._sockets: Path | None = None
        self._connection: Connection | None = None
        self.end: asyncio.Future[bytes] | None = None
        self._servers = ray_servers()
        self._others = others
        self._hung = hung or HungProcesses()
        self._missing_node = missing_node
        self._say = say
        self.actor = self._start()

    async def build(self, payload: bytes, *, timeout_s: float) -> None:
        """Load the models of all roles; `payload` is a BuildCall.

        Raises:
            WorkerError: see WorkerHandle.call.
        """
        self._built = payload, timeout_s
        with self.errors("build", timeout_s, key=_START_KEY):
            async with asyncio.timeout(timeout_s):
                await self.actor.call.remote(self.roles[0], "build", payload)

    async def share_gpus(self) -> None:
        """Have the process see the GPUs of its lenders, once all of them are ready.

        Raises:
            WorkerError: see WorkerHandle.call.
        """
        if self._lenders:
            with self.errors("share_gpus"):
                await self.actor.share_gpus.remote(",".join(lender.gpus for lender in self._lenders))

    @property
    def gpus(self) -> str:
        """The GPUs that it sees, as in CUDA_VISIBLE_DEVICES; empty: none, or it is not ready."""
        return self._place.gpus if self._place is not None else ""

    async def rendezvous(self, network: RankNetwork, *, timeout_s: float) -> RendezvousAddress:
        """Have the process listen, as rank 0, for the other ranks of its model.

        Raises:
            ConfigError: its host does not have the interface.
            WorkerError: see WorkerHandle.call.
        """
        with self.errors("rendezvous", timeout_s, key=_START_KEY):
            async with asyncio.timeout(timeout_s):
                answer = await self.actor.rendezvous.remote(msgspec.msgpack.encode(network))
        return msgspec.msgpack.decode(answer, type=RendezvousAddress)

    @contextmanager
    def errors(self, method: str, timeout_s: float = 0.0, name: str = "", key: str = _STAGE_KEY) -> Generator[None]:
        """Translate the errors of a call of the actor.

        Args:
            method: the method, for messages.
            timeout_s: the deadline of the call, for messages.
            name: name of the worker that is called, for messages; empty: that of the process.
            key: the setting of the deadline, for messages.

        Raises:
            WorkerError: see WorkerHandle.call.
            RLError: raised by the method.
        """
        try:
            yield
        except _FAILURES as error:
            raise self._translate(name or self.name, method, error, timeout_s, key) from None

    async def ready(self, timeout_s: float) -> None:
        """Wait until the process has started, at most `timeout_s` seconds; say so if its node is
        missing, since another one may join the cluster.

        Raises:
            ConfigError: it sees other GPUs than its own.
            WorkerError: it died, did not start within `timeout_s`, or a server of Ray or one of
                `others` has ended.
        """
        saying = asyncio.create_task(self._say_missing_node(timeout_s))
        try:
            async with asyncio.timeout(timeout_s):
                starting = self.actor.place.remote()
                ends = lambda: [*ended(self._servers), *self._others()]  # noqa: E731
                started = await unless_ended(starting, ends, f"Worker {self.name} can't start")
        except _FAILURES as error:
            if isinstance(error, TimeoutError):
                missing = await asyncio.to_thread(self._missing_node) if self._missing_node else ""
                remedy = "Add a node, or raise ray.start_timeout_s; trainer.resume_mode=auto resumes the run."
                why = f"{self._lacks(missing)}. {remedy}" if missing else f"Its log: {self._log_path}"
                raise WorkerError(
                    f"Worker {self.name} did not start within {timeout_s:g} s (ray.start_timeout_s). {why}"
                ) from None
            raise self._translate(self.name, "start", error, timeout_s, _START_KEY) from None
        finally:
            saying.cancel()
            saying.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # Ray's servers have ended
        self._place = place = msgspec.msgpack.decode(started, type=WorkerPlace)
        self._require_own_gpus(place.gpus)
        self.memory, self.network = place.memory, place.network
        elsewhere = place.memory != this_host()
        self.pid, self.host = 0 if elsewhere else place.pid, None
        if elsewhere or self._host is not None:
            node, self._address = self._node()
            if elsewhere:
                self.host = OtherHost(place.host, place.memory, node, self._address)

    def _require_own_gpus(self, seen: str) -> None:
        """Check that the process sees as many GPUs as Ray has reserved for it.

        Raises:
            ConfigError: Ray was told not to choose them.
        """
        if self._gpus and len(seen.split(",") if seen else ()) != self._gpus:
            raise ConfigError(
                f"Worker {self.name}{self._where} has {counted(self._gpus, 'GPU')} and sees {f'GPUs {seen}' if seen else 'all'} of its node: Ray "
                "leaves CUDA_VISIBLE_DEVICES as it is. Start Ray on all nodes without RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES."
            )

    async def _say_missing_node(self, timeout_s: float) -> None:
        """Say once that the start waits for a node."""
        look, missing = self._missing_node, ""
        if look is None:
            return
        while not missing:
            await asyncio.sleep(_LOOK_S)
            missing = await asyncio.to_thread(look)
        self._say(
            f"worker {self.name} can't start yet: {self._lacks(missing)}. The run waits up to {timeout_s:g} s (ray.start_timeout_s) for "
            "a node to join; or stop it, and resume it later with trainer.resume_mode=auto"
        )

    def _lacks(self, missing: str) -> str:
        gone = f"Node {self._address}" if self._address else "A node"
        return f"{gone} is gone, and the Ray cluster has no other one for {missing}"

    def _node(self) -> tuple[str, str]:
        """Ray's id of the node that it runs on, and the address of the node."""
        actor: Any = state.actors(self.actor._actor_id.hex())
        node = actor["Address"]["NodeID"]
        return node, next(one["NodeManagerAddress"] for one in ray.nodes() if one["NodeID"] == node)

    @property
    def watched(self) -> Watched | None:
        """Its heartbeat; None: it is not ready, or has ended."""
        if self._place is None or (self.end is not None and self.end.done()):
            return None
        return Watched(f"Worker {self.name}{self._where}", self._place.pid, Path(self._place.heartbeat), self.host)

    async def connect(self, folder: Path) -> None:
        """Send the calls that follow over a Unix socket in this folder of mode 0700.

        Those to a process on another host still go through Ray, and so do those of all processes if
        the path of the folder is too long for a socket.

        Raises:
            WorkerError: see WorkerHandle.call.
        """
        self._sockets = folder
        path = folder / f"{self.pid}.sock"
        if self.pid and len(bytes(path)) <= SOCKET_PATH_LIMIT:
            with self.errors("listen"):
                await self.actor.listen.remote(str(path))
            self._connection = await Connection.connect(path)
        end: asyncio.Future[bytes] = asyncio.ensure_future(self.actor.stay.remote())
        end.add_done_callback(partial(_close, self._connection))
        self.end = end

    async def call(self, role: Role, method: str, payload: bytes) -> bytes:
        """Call the worker of a role; use it within `errors`."""
        end, actor = self.end, self.actor
        if self._connection is None or end is None:
            answer = self.actor.call.remote(role, method, payload)
            try:
                return await answer
            except asyncio.CancelledError:
                if method in CANCELLED:
                    ray.cancel(answer)
                raise
        try:
            answer = await self._connection.call(role, method, payload)
        except ConnectionResetError:
            await asyncio.wait([end], timeout=_END_S)
            if not end.done():
                _log.warning("Worker %s has closed its connection and lives; it is killed.", self.name)
                ray.kill(actor)
            return await asyncio.shield(end)  # raises why the process has ended
        if answer.payload is None:
            return await self.actor.raise_error.remote(answer.number)
        return answer.payload

    def send(self, method: str, payload: bytes) -> Callable[[], Awaitable[bytes]]:
        """Start a call through Ray, ahead of all later ones, without waiting for it.

        Returns:
            A function that waits for the answer. It raises WorkerError if the process died, and
            the RLError or OSError of the handler.
        """
        answer = self.actor.call.remote(self.roles[0], method, payload)

        async def wait() -> bytes:
            with self.errors(method):
                return await answer

        return wait

    async def warm_up(self, config: str) -> AsyncIterator[WarmupProgress]:
        """Make the demo model or find it in the cache; the last item has its path."""
        with self.errors("warm_up"):
            async for item in self.actor.warm_up.options(num_returns="streaming").remote(config):
                yield msgspec.msgpack.decode(await item, type=WarmupProgress)

    async def restart(self) -> None:
        """Kill the process if it still runs, and start and build another in its place.

        Raises:
            WorkerError: as `build`.
        """
        self.kill()
        self.pid, self._place, self.end = 0, None, None
        self.actor = self._start()
        if self._built is not None:
            payload, timeout_s = self._built
            await self.ready(timeout_s)
            await self.share_gpus()
            await self.build(payload, timeout_s=timeout_s)
        if self._sockets is not None:
            await self.connect(self._sockets)

    def kill(self) -> None:
        """Kill the process."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        ray.kill(self.actor)

    def _start(self) -> Any:
        options: dict[str, Any] = {"num_cpus": self._cpus, "max_restarts": 0, "max_concurrency": 16}
        if self._host is not None:
            options |= {"num_gpus": self._gpus, **self._host}
        elif self._gpus or self._lenders:
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            options |= {"num_gpus": self._gpus, "scheduling_strategy": here}
        return _actor_class.options(**options).remote(
            self.roles, self.name, self._log_path, self._threads, hide_gpus=not self._gpus, logs_output=True
        )

    @property
    def _where(self) -> str:
        """Where it runs, for messages: another host, or in a run on several hosts a node of this
        one.
        """
        if self.host is not None:
            return f" on {self.host}"
        return f" on node {self._address}" if self._address else ""

    def _translate(self, name: str, method: str, error: Exception, timeout_s: float, key: str) -> RLError:
        log = f"Its log: {self._log_path}"
        if isinstance(error, RayTaskError):
            cause: object = getattr(error, "cause", None)
            if isinstance(cause, RLError):
                return cause
            return WorkerError(f"Worker {name} failed in {method}: {type(cause).__name__}: {cause}. {log}")
        if isinstance(error, UnserializableException):  # of a library; its text is that of its traceback
            return WorkerError(f"Worker {name} failed in {method}: {plain(error).strip().splitlines()[-1]}. {log}")
        if isinstance(error, RayActorError) and _CREATION in str(error):  # another one would fail, too
            return WorkerError(f"Worker {name} failed in {method}: {reason_of(error)} {log}")
        if isinstance(error, RayActorError):
            place = self._place
            hung = self._hung.end_of(place.pid, self.host) if place is not None else ""
            reason = f"its process {hung}." if hung else reason_of(error)
            return WorkerDiedError(f"Worker {name}{self._where} died during {method}: {reason} {log}")
        return WorkerError(
            f"Worker {name} did not answer {method} within {timeout_s:g} s; raise {key} or see its log. {log}"
        )


def _close(connection: Connection | None, end: asyncio.Future[bytes]) -> None:
    """Close the connection to a process that has ended, so that all calls end."""
    if not end.cancelled():
        end.exception()  # those calls raise it
    if connection is not None:
        connection.close()


class RayWorker:
    """The driver's WorkerHandle of one role in a process.

    Attributes:
        name: its name, in messages.
        role: its role.
        process: the process, which may have other roles, too.
        bytes_moved: bytes of its requests and answers.
    """

    def __init__(self, process: RayProcess, role: Role, name: str) -> None:
        self.name = name
        self.role: Role = role
        self.process = process
        self.bytes_moved = 0

    async def call(self, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        self.bytes_moved += len(payload)
        waiting = self.process.calls.waiting(self.name, method, payload)
        with waiting, self.process.errors(method, timeout_s, self.name):
            async with asyncio.timeout(timeout_s):
                answer = await self.process.call(self.role, method, payload)
        self.bytes_moved += len(answer)
        return answer

    async def restart(self) -> None:
        """Replace the process; see RayProcess.restart."""
        await self.process.restart()
