"""A worker process, without Ray: build the workers of its roles, answer calls."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import socket
import sys
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rl_app_ppo.config.full_keys import RunLog
from rl_app_ppo.config.placement import Role
from rl_app_ppo.garbage_collection import without_gc
from rl_app_ppo.rank_network import RankNetwork, rank_interface
from rl_app_ppo.worker.call_socket import CallServer
from rl_app_ppo.worker.messages import CLOSE_RECORD, BuildCall, WarmupProgress, WorkerPlace
from rl_app_ppo.worker.rank_connections import named_rank_connections
from rl_app_ppo.worker.weight_endpoints import require_admission
from rl_ckpt_engine.endpoints.operations import METHODS
from rl_protocol import RLError, WorkerError
from rl_protocol.support.heartbeat import beat_in_memory
from rl_protocol.support.host.this_process import end_at_sigterm
from rl_protocol.support.host_identity import this_host
from rl_protocol.support.network_interface import this_network
from rl_protocol.support.rendezvous import RendezvousListener
from rl_protocol.support.stack_dumps import STACK_LOG, dump_at_signal
from rl_protocol.support.trusted_files import FILES
from rl_trainer.record.record_file import RecordFile
from rl_trainer.record.record_rows import CallRow, SpanRow
from rl_trainer.workers.messages import ComputeCall

if TYPE_CHECKING:
    from rl_app_ppo.worker.build import Built
    from rl_app_ppo.worker.torch_trace import Trace

_log = logging.getLogger(__name__)

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
"""Which GPUs CUDA shows to a process; read when it first uses one."""


class WorkerProcess:
    """The workers of one process: their models, and their endpoints of the weight sync.

    Lifecycle: created with the process; the call `build` loads everything; then the handlers of the
    workers and `weights.*` can be called.

    Args:
        roles: what the process does; a worker for each.
        name: its name, in the log.
        log_path: its log.
        threads: compute threads; 0: all cores, shared with the processes that compute beside it.
        hide_gpus: see none of the GPUs of the node; Ray shows all to a process that reserves none.
        logs_output: what the process and its children print goes to the log, too.
    """

    def __init__(
        self,
        roles: Sequence[Role],
        name: str,
        log_path: Path,
        threads: int,
        *,
        hide_gpus: bool = False,
        logs_output: bool = False,
    ) -> None:
        end_at_sigterm()  # Ray's handler waits until all calls have ended, and `stay` never does
        if hide_gpus:
            os.environ[VISIBLE_GPUS] = ""
        self._roles = tuple(roles)
        self._workers: dict[Role, Built] = {}
        self._trace: Trace | None = None
        self._calls = CallServer(self.call)
        self._listening: asyncio.Server | None = None
        self._rendezvous: RendezvousListener | None = None
        self._share_cores: Callable[[int], None] | None = None
        self._name = name
        self._record: RecordFile | None = None
        self._lends_gpu = False
        handler = RunLog(log_path)
        logging.getLogger().addHandler(handler)
        if logs_output:
            _print_into(log_path)
        dump_at_signal(handler.stream)
        os.environ[STACK_LOG] = str(log_path)  # for the processes that this one starts
        logging.getLogger().setLevel(logging.INFO)
        logging.captureWarnings(capture=True)
        _log.info("worker %s starts as %s, process %d", name, ", ".join(roles), os.getpid())
        if self._roles != ("reward",):
            with without_gc():
                from rl_app_ppo.worker import torch_setup  # torch: the reward process needs none

            torch_setup.configure(threads)
            self._share_cores = None if threads else torch_setup.share_cores

    async def place(self) -> bytes:
        """Begin the heartbeat of this process; returns its WorkerPlace, msgpack."""
        place = WorkerPlace(
            host=socket.gethostname(),
            memory=this_host(),
            network=this_network(),
            pid=os.getpid(),
            heartbeat=str(beat_in_memory()),
            gpus=os.environ.get(VISIBLE_GPUS, ""),
        )
        return msgspec.msgpack.encode(place)

    async def share_gpus(self, gpus: str) -> None:
        """See the GPUs of other processes; called before `build`.

        Args:
            gpus: those that the others see, as in CUDA_VISIBLE_DEVICES.
        """
        os.environ[VISIBLE_GPUS] = gpus

    async def listen(self, path: str) -> None:
        """Take calls at a Unix socket, too, which is made at this path."""
        self._listening = await self._calls.listen(Path(path))

    async def rendezvous(self, payload: bytes) -> bytes:
        """Listen as rank 0 for the other ranks of the model, which `build` joins.

        Args:
            payload: a RankNetwork.

        Returns:
            RendezvousAddress, msgpack.

        Raises:
            ConfigError: this host does not have the interface.
        """
        network = msgspec.msgpack.decode(payload, type=RankNetwork)
        self._rendezvous = RendezvousListener(rank_interface(network))
        return msgspec.msgpack.encode(self._rendezvous.address)

    async def stay(self) -> bytes:
        """Never return: Ray ends this call with the reason why the process has ended."""
        return await asyncio.get_running_loop().create_future()

    async def raise_error(self, number: int) -> bytes:
        """Raise the error with which a call over the socket failed."""
        raise self._calls.take_error(number)

    async def call(self, role: Role, method: str, payload: bytes) -> bytes:
        """Answer one call to the worker of a role; `build` and `profile.*` are for all of them.

        Raises:
            RLError: raised by the handler, or a RankConnectionError.
            WorkerError: there is no such method, or the worker is not built yet.
        """
        try:
            return await self._dispatch(role, method, payload)
        except Exception as error:  # the driver gets its message, not its traceback
            if isinstance(error, RLError) and error.__cause__ is None:
                raise
            _log.exception("worker %s failed in %s", self._name, method)
            raise

    async def _dispatch(self, role: Role, method: str, payload: bytes) -> bytes:
        if method == "build":
            return await self._build(msgspec.msgpack.decode(payload, type=BuildCall))
        if method == CLOSE_RECORD:
            if self._record is not None:
                await asyncio.to_thread(self._record.close)
            return b""
        if method.startswith("profile."):
            return self._profile(method, Path(payload.decode()))
        if role not in self._workers:
            raise WorkerError(f"{method!r} of {role} was called before build.")
        with self._recorded(method), named_rank_connections(self._name, method), self._lent_gpu():
            return await self._answer(role, method, payload)

    @contextmanager
    def _recorded(self, stage: str) -> Generator[None]:
        """Record when the call of a stage began and ended."""
        began, clock = time.time(), time.perf_counter()
        if self._record is not None:
            self._record.append([CallRow(at=began, worker=self._name, stage=stage)])
        try:
            yield
        finally:
            if self._record is not None:
                ended = began + time.perf_counter() - clock
                self._record.append([SpanRow(at=ended, worker=self._name, stage=stage, began=began)])

    async def _answer(self, role: Role, method: str, payload: bytes) -> bytes:
        worker, weights = self._workers[role]
        if method.startswith(METHODS):
            if weights is None:
                raise WorkerError(f"{method!r} was called on a worker that takes no part in the weight sync.")
            return await weights.handle(method.removeprefix(METHODS), payload)
        require_admission(weights, method)
        if self._share_cores is not None and (processes := _processes(payload)):
            self._share_cores(processes)
        return await worker.handle(method, payload)

    @contextmanager
    def _lent_gpu(self) -> Generator[None]:
        """Give memory that is used and freed within back to the GPU, if a replica uses it, too."""
        try:
            yield
        finally:
            if self._lends_gpu:
                from rl_app_ppo.worker import torch_setup

                torch_setup.release_cached_memory()

    async def warm_up(self, config: str) -> AsyncGenerator[bytes]:
        """Make the demo model or find it in the cache; the last WarmupProgress has its path."""
        from rl_app_ppo.worker import torch_setup

        queue: asyncio.Queue[WarmupProgress] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def report(step: int, total: int, loss: float) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, WarmupProgress(step=step, total=total, loss=loss))

        work = asyncio.create_task(asyncio.to_thread(torch_setup.demo_model, config, report))
        while not work.done() or not queue.empty():
            getter = asyncio.create_task(queue.get())
            await asyncio.wait({getter, work}, return_when=asyncio.FIRST_COMPLETED)
            if getter.done():
                yield msgspec.msgpack.encode(getter.result())
            else:
                getter.cancel()
        yield msgspec.msgpack.encode(WarmupProgress(path=str(work.result())))

    def _profile(self, method: str, path: Path) -> bytes:
        """Start a trace, or write it to `path`."""
        from rl_app_ppo.worker.torch_trace import Trace

        if method == "profile.begin":
            self._trace = Trace()
        elif self._trace is not None:
            trace, self._trace = self._trace, None
            trace.write(path)
        return b""

    async def _build(self, call: BuildCall) -> bytes:
        if call.trusted_files:
            os.environ[FILES] = msgspec.json.encode(call.trusted_files).decode()
        self._lends_gpu = call.lends_gpu
        with self._lent_gpu(), without_gc():
            from rl_app_ppo.worker import build

            self._record = RecordFile(Path(call.record), self._name) if call.record else None
            with self._recorded("build"):
                self._workers = await build.build_workers(self._roles, call, self._rendezvous, self._record)
        return b""


def _processes(payload: bytes) -> int:
    """The processes that compute beside a call; 0: it does not say."""
    return msgspec.msgpack.decode(payload, type=ComputeCall).side_by_side


def _print_into(path: Path) -> None:
    """Append standard output and error of this process to a file, each line when it is printed."""
    with path.open("ab") as file:
        for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(file.fileno(), descriptor)
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)
