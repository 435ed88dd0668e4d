"""Weight synchronisation across processes: which classes take part, and the handles through which the driver reaches the workers.

What a run may load is decided once, by the driver; workers are handed its decision (BuildCall.plugins) and come to the same classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from rl_app_ppo.runtime.messages import WeightCall, WeightsSent
from rl_app_ppo.wiring.changes import MeasuredSender
from rl_ckpt_engine import (
    CheckpointEngine,
    CheckpointEngineConfig,
    CheckpointEngineManager,
    CheckpointEngineRegistry,
    Memory,
    PluginPolicy,
    ReceiveAck,
    ReceiverEndpoint,
)
from rl_ckpt_engine.progress import Tell
from rl_protocol import ConfigError, WorkerError
from rl_protocol.ports import WeightSender
from rl_trainer import WorkerHandle
from rl_trainer.dispatch import together

OnStep = Callable[[int, Mapping[str, float]], None]
MARGIN_S = 5.0  # the worker's own deadline passes first, so that its message, which knows more, is the one that is seen


def make_engine(config: CheckpointEngineConfig, plugins: PluginPolicy) -> CheckpointEngine:
    """The engine of this process.

    Raises:
        ConfigError: nobody offers it, it may not be loaded, or a setting that it needs is missing.
    """
    return CheckpointEngineRegistry(plugins).resolve(config).create(config)


def make_sync(
    config: CheckpointEngineConfig,
    plugins: PluginPolicy,
    sender: RemoteSender,
    rollout: Sequence[WorkerHandle],
    progress: Tell | None = None,
) -> CheckpointEngineManager:
    """The driver's manager of all rollout workers; `progress` is told about syncs that take long.

    Raises:
        ConfigError: see `make_engine`; or the manager may not be loaded.
    """
    registry = CheckpointEngineRegistry(plugins)
    receivers = [RemoteReceiver(worker) for worker in rollout]
    return registry.manager(config)(sender, receivers, config, registry.resolve(config), progress)


def measured(sync: CheckpointEngineManager, sender: RemoteSender, on_step: OnStep) -> OnStep:
    """`on_step` that is also told what manager and sender measured, for the steps that synchronised."""

    def record(step: int, metrics: Mapping[str, float]) -> None:
        on_step(step, {**sync.metrics, **sender.metrics, **metrics} if "weight_sync/version" in metrics else metrics)

    return record


def check_sync(config: CheckpointEngineConfig, plugins: PluginPolicy) -> type[CheckpointEngine]:
    """Everything that `make_engine` and `make_sync` would refuse, while there is no process yet; returns the class of the engine.

    Raises:
        ConfigError: what they refuse; or an engine that works within one process only.
    """
    registry = CheckpointEngineRegistry(plugins)
    engine = registry.resolve(config)
    registry.manager(config)
    if engine.name.removeprefix("delta-") == "naive":
        raise ConfigError(
            f"checkpoint_engine.backend={engine.name} works within one process, and trainer and rollout are several here; set it to shm."
        )
    if "cpu" in engine.capabilities.devices:  # one for GPUs can't be made where the driver may run
        engine.create(config).close()
    return engine


class FollowingSender:
    """The end of a rank that sends nothing: it takes part in putting sharded weights together, which the first rank sends."""

    def __init__(self, source: WeightSender) -> None:
        self._source = source

    def follow(self) -> bytes:
        """Go through all weights, at the same time as the first rank; there is nothing to answer."""
        for _ in self._source.named_weights():
            pass
        return b""


WeightEnd = MeasuredSender | FollowingSender | ReceiverEndpoint
"""What a worker process may have of the weight synchronisation."""


async def answer(end: WeightEnd | None, method: str, call: WeightCall) -> bytes:
    """In the worker process: what one call of the handles below does.

    Raises:
        WeightSyncError: whatever the end raised.
        WorkerError: it has no such method.
    """
    done = None
    if isinstance(end, MeasuredSender):
        done = await _answer_sender(end, method, call)
    elif isinstance(end, ReceiverEndpoint):
        done = await _answer_receiver(end, method, call)
    elif end is not None and method == "follow":
        done = end.follow()
    if done is None:
        raise WorkerError(f"weights.{method} was called on a worker whose end of the sync is {type(end).__name__}.")
    return done


def require_admission(end: WeightEnd | None, method: str) -> None:
    """In the worker process: nothing is generated with weights of no known version, nor of one that the others have left behind.

    Raises:
        WorkerError: the end is paused: the last synchronisation failed here.
    """
    if isinstance(end, ReceiverEndpoint) and not end.admitting:
        raise WorkerError(
            f"{method!r} was called on a replica whose last weight synchronisation failed, which may hold old or torn weights. driver.log has "
            "the reason. It generates again once a synchronisation has succeeded here, or its process was replaced; if it was late, set a "
            "higher checkpoint_engine.timeout_s."
        )


async def _answer_sender(end: MeasuredSender, method: str, call: WeightCall) -> bytes | None:
    match method:
        case "send":
            manifest = await end.send(call.version, call.timeout_s)
            return msgspec.msgpack.encode(WeightsSent(manifest=manifest, metrics=end.metrics))
        case "finalize":
            await end.finalize(call.version)
        case "abort":
            await end.abort()
        case "serve":
            await end.serve(call.manifest, call.timeout_s)
        case _:
            return await _answer_any(end, method, call)
    return b""


async def _answer_receiver(end: ReceiverEndpoint, method: str, call: WeightCall) -> bytes | None:
    match method:
        case "pause":
            await end.pause(call.timeout_s)
        case "receive":
            return msgspec.msgpack.encode(await end.receive(call.manifest, call.timeout_s))
        case "activate":
            return msgspec.msgpack.encode(await end.activate(call.version, call.timeout_s))
        case "resume":
            await end.resume(call.timeout_s)
        case "sleep":
            await end.sleep(call.level, call.timeout_s)
        case "wake":
            await end.wake(call.part, call.timeout_s)
        case _:
            return await _answer_any(end, method, call)
    return b""


async def _answer_any(end: MeasuredSender | ReceiverEndpoint, method: str, call: WeightCall) -> bytes | None:
    match method:
        case "prepare":
            return await end.prepare()
        case "join":
            await end.join(call.member, call.timeout_s)
            return b""
        case "republish":
            return await end.republish(call.timeout_s)
        case _:
            return None


class RemoteSender:
    """GroupSenderHandle and CachingHandle over the processes that share the policy: the first one sends, the others help to put its weights
    together.

    Attributes:
        metrics: what the first one measured while it sent last.
    """

    def __init__(self, ranks: Sequence[WorkerHandle]) -> None:
        self._first, *self._others = ranks
        self.metrics: dict[str, float] = {}

    async def send(self, version: int, timeout_s: float) -> bytes:
        """Pack the weights as `version`; returns the manifest."""
        message = WeightCall(version=version, timeout_s=timeout_s)
        others = (_call(rank, "follow", message) for rank in self._others)
        answered, *_ = await together(_call(self._first, "send", message), *others)
        sent = msgspec.msgpack.decode(answered, type=WeightsSent)
        self.metrics = sent.metrics
        return sent.manifest

    async def finalize(self, version: int) -> None:
        """Everybody has the version: its buffers may be used again."""
        await _call(self._first, "finalize", WeightCall(version=version))

    async def abort(self) -> None:
        """Give the sync up."""
        await _call(self._first, "abort", WeightCall())

    async def republish(self, timeout_s: float) -> bytes:
        """Serve the version committed last to late joiners; returns the manifest."""
        return await _call(self._first, "republish", WeightCall(timeout_s=timeout_s))

    async def prepare(self) -> bytes:
        """Metadata for a group."""
        return await _call(self._first, "prepare", WeightCall())

    async def join(self, member: bytes, timeout_s: float) -> None:
        """Join a group, at the same time as all its members."""
        await _call(self._first, "join", WeightCall(member=member, timeout_s=timeout_s))

    async def serve(self, manifest: bytes, timeout_s: float) -> None:
        """Move what was sent, while the receivers receive it."""
        await _call(self._first, "serve", WeightCall(manifest=manifest, timeout_s=timeout_s))


class RemoteReceiver:
    """SleepingHandle, GroupHandle and CachingHandle over a worker process."""

    def __init__(self, worker: WorkerHandle) -> None:
        self._worker = worker

    @property
    def name(self) -> str:
        """Name of the replica."""
        return self._worker.name

    async def receive(self, manifest: bytes, timeout_s: float) -> ReceiveAck:
        """Fetch and verify into staging."""
        answer = await _call(self._worker, "receive", WeightCall(manifest=manifest, timeout_s=timeout_s))
        return msgspec.msgpack.decode(answer, type=ReceiveAck)

    async def activate(self, version: int, timeout_s: float) -> int:
        """Generate with the staged weights from now on; returns the version that is active then."""
        answer = await _call(self._worker, "activate", WeightCall(version=version, timeout_s=timeout_s))
        return msgspec.msgpack.decode(answer, type=int)

    async def pause(self, timeout_s: float) -> None:
        """End what runs and admit nothing."""
        await _call(self._worker, "pause", WeightCall(timeout_s=timeout_s))

    async def resume(self, timeout_s: float) -> None:
        """Admit requests again."""
        await _call(self._worker, "resume", WeightCall(timeout_s=timeout_s))

    async def sleep(self, level: int, timeout_s: float) -> None:
        """Give memory back."""
        await _call(self._worker, "sleep", WeightCall(level=level, timeout_s=timeout_s))

    async def wake(self, part: Memory | None, timeout_s: float) -> None:
        """Have memory again."""
        await _call(self._worker, "wake", WeightCall(part=part, timeout_s=timeout_s))

    async def republish(self, timeout_s: float) -> bytes:
        """Serve the active version to late joiners; returns the manifest."""
        return await _call(self._worker, "republish", WeightCall(timeout_s=timeout_s))

    async def prepare(self) -> bytes:
        """Metadata for a group."""
        return await _call(self._worker, "prepare", WeightCall())

    async def join(self, member: bytes, timeout_s: float) -> None:
        """Join a group, at the same time as all its members."""
        await _call(self._worker, "join", WeightCall(member=member, timeout_s=timeout_s))


async def _call(worker: WorkerHandle, method: str, call: WeightCall) -> bytes:
    return await worker.call(f"weights.{method}", msgspec.msgpack.encode(call), timeout_s=call.timeout_s + MARGIN_S)
