"""Build the worker of each role from concrete classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import msgspec

from rl_app_ppo.config.full_keys import adapter_errors
from rl_app_ppo.config.loading import from_yaml
from rl_app_ppo.config.model_path import read_json
from rl_app_ppo.config.placement import Role, critic_shares_base, rollout_in_actor, shares_base, shares_weights
from rl_app_ppo.config.rollout_engines import RolloutSetup
from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.config.training_backends import TrainingBackendSpec
from rl_app_ppo.demo.demos import DEMOS
from rl_app_ppo.inputs.data import demonstrations, open_data, teacher_context
from rl_app_ppo.inputs.input_files import check_data
from rl_app_ppo.inputs.session import session_of
from rl_app_ppo.inputs.tokenizer import decoder, eos_of, load_tokenizer, raw_decoder, session_tokenizer, vision_of
from rl_app_ppo.rank_network import listening_in, rank_interface
from rl_app_ppo.worker.cores import cores_of_each
from rl_app_ppo.worker.messages import BuildCall
from rl_app_ppo.worker.rewards import open_scorer
from rl_app_ppo.worker.weight_endpoints import AdapterOnly, AdapterSource, make_engine
from rl_ckpt_engine import CheckpointEngine, FollowerEndpoint, ReceiverEndpoint, SenderEndpoint
from rl_ckpt_engine.endpoints.operations import Endpoint
from rl_protocol import ConfigError
from rl_protocol.ports import DataPlane, PolicyBackend, RolloutEngine
from rl_protocol.support.rendezvous import Rendezvous, RendezvousListener
from rl_trainer import (
    ActorWorker,
    CriticWorker,
    FsdpConfig,
    ReferenceWorker,
    RewardSettings,
    RewardWorker,
    RolloutWorker,
    StepColumns,
    TorchConfig,
    Worker,
    needs_sum_pi_squared,
    step_columns,
)
from rl_trainer.algorithms.old_log_prob import loss_correction
from rl_trainer.data.image_columns import ImageReader
from rl_trainer.data.images import Vision
from rl_trainer.data.model_families import RoutedLayers
from rl_trainer.record.record_file import RecordFile
from rl_trainer.workers.model import UpdateMeter
from rl_trainer.workers.sample_log import SampleLog
from rl_trainer.workers.trajectory_record import RecordSettings, TrajectoryRecord
from rl_transferqueue import PlaneDescriptor, connect

if TYPE_CHECKING:
    from rl_trainer.backends.parallel_strategy import ParallelStrategy
    from rl_trainer.backends.torch_critic import TorchCriticBackend


class TrainedPolicy(PolicyBackend, AdapterSource, Protocol):
    """The policy of every training engine."""


@runtime_checkable
class SharesBase(Protocol):
    """A rollout engine that merges adapters into base weights lent by the actor in its process."""

    def share_base(self, base: Mapping[str, Any]) -> None:
        """Use these tensors by name, which never change, instead of copies."""
        ...


Built = tuple[Worker, Endpoint | None]
Build = Callable[[Role, RolloutEngine | None], Built]
"""Builds the worker of a trained role; the second argument is the process's own rollout engine."""
Builder = Callable[[AppConfig, BuildCall, DataPlane, StepColumns, Rendezvous], Build]
"""Joins the ranks of a process that trains with one engine, and builds the workers of its roles."""
TRAINED: tuple[Role, ...] = ("actor", "ref", "critic")
"""The roles whose ranks share a model."""


async def build_workers(
    roles: Sequence[Role],
    call: BuildCall,
    listener: RendezvousListener | None = None,
    record: RecordFile | None = None,
) -> dict[Role, Built]:
    """Connect to the data plane, load the models of the roles of a process, create their workers.

    Args:
        roles: the roles of the process.
        call: what to load, and where the data plane and the other ranks are.
        listener: at which this process, as rank 0, awaits the other ranks.
        record: where this process records what it does; None: it does not.

    Returns:
        The worker of each role, and its endpoint of the weight synchronization.
    """
    config, path = from_yaml(call.config), Path(call.model_path)
    plane = await connect(msgspec.json.decode(call.plane, type=PlaneDescriptor))
    columns = step_columns(
        config.algorithm, config.actor, images=vision_of(path) is not None, kept=config.rollout.records_kept_sets
    )
    trains = set(roles) & set(TRAINED)
    if config.trainer.deterministic:
        from rl_trainer.backends.world import compute_deterministically  # torch: the reward process needs none

        compute_deterministically()
    build: Build | None = None
    if trains:
        build = load_builder(config.backend)(config, call, plane, columns, _meeting(config, call, listener))
    built: dict[Role, Built] = {}
    generator: RolloutEngine | None = None
    for role in reversed(roles):  # the actor last: the generators continue from its seed
        if role == "reward":
            built[role] = await _reward(config, call, plane, columns, record), None
        elif role == "rollout":
            generator = _generator(config, path)
            built[role] = _rollout(config, call, plane, generator)
        elif build is not None:
            built[role] = build(role, generator)
    if shares_weights(config) and generator is not None and generator.capabilities.adopts and "actor" in built:
        await _share_weights(built["actor"][1], built["rollout"][1], config.checkpoint_engine.timeout_s)
    return built


def _meeting(config: AppConfig, call: BuildCall, listener: RendezvousListener | None) -> Rendezvous:
    """Where this process joins the other ranks of its model."""
    return Rendezvous(
        rank=call.rank,
        size=config.ranks,
        address=call.rendezvous,
        interface=rank_interface(call.network),
        chosen=bool(call.network.interface),
        listener=listener,
    )


def join_timeout_s(config: AppConfig) -> float:
    """Longest wait for the other ranks; shorter than that of the driver, so that it names them."""
    return config.ray.start_timeout_s / 2


def load_builder(backend: TrainingBackendSpec) -> Builder:
    """The builder of a training engine, from a module that may need an optional package."""
    module, _, name = backend.build.partition(":")
    return getattr(import_module(module), name)


async def _share_weights(sender: Endpoint | None, receiver: Endpoint | None, timeout_s: float) -> None:
    """Replace the weights that the rollout has loaded by the actor's own: version 0."""
    if isinstance(sender, SenderEndpoint) and isinstance(receiver, ReceiverEndpoint):
        sent = await sender.send(0, timeout_s)
        await receiver.receive(sent.manifest, timeout_s)
        await receiver.activate(0, timeout_s)
        await sender.finalize(0)


async def _reward(
    config: AppConfig, call: BuildCall, plane: DataPlane, columns: StepColumns, record: RecordFile | None
) -> Worker:
    path = Path(call.model_path)
    tokenizer = load_tokenizer(path)
    note = "" if config.data.train_files else DEMOS[config.data.demo].note
    return RewardWorker(
        plane,
        columns,
        await open_scorer(config.reward, path),
        decoder(tokenizer),
        RewardSettings(
            algorithm=config.algorithm,
            response_length=config.rollout.response_length,
            policy_loss=config.actor.policy_loss,
            overlong=config.reward.overlong,
            seed=config.trainer.seed,
        ),
        samples=SampleLog(Path(call.samples), note=note) if call.samples else None,
        record=None if record is None else _trajectory_record(config, plane, record, raw_decoder(tokenizer)),
    )


def _trajectory_record(
    config: AppConfig, plane: DataPlane, file: RecordFile, decode: Callable[[Sequence[int]], str]
) -> TrajectoryRecord:
    settings = RecordSettings(
        freq=config.trainer.sample_freq,
        count=config.trainer.samples_per_step,
        seed=config.trainer.seed,
        stale=config.async_rl.max_staleness > 0,
    )
    return TrajectoryRecord(plane, file, decode, settings)


def _rollout(config: AppConfig, call: BuildCall, plane: DataPlane, engine: RolloutEngine) -> Built:
    path = Path(call.model_path)
    receiver = ReceiverEndpoint(weight_engine(config, call), engine)
    data, session, vision = open_data(config, path), session_of(config, path), vision_of(path)
    check_data(config, data, call.data_files)
    tokenizer = session_tokenizer(load_tokenizer(path), vision)
    worker = RolloutWorker(
        plane,
        engine,
        data,
        session,
        tokenizer,
        _reader(path, vision),
        demonstrations=demonstrations(config, tokenizer, eos_of(path)) if config.demonstrates else None,
        observations=config.algorithm.trains_observations,
        restart=config.async_rl.on_update == "abort",
        kept_sets=config.rollout.records_kept_sets,
        experts=_recorded_experts(config, path),
        teacher=teacher_context(config, tokenizer, eos_of(path)) if config.algorithm.teacher_context else None,
    )
    return worker, receiver


def _recorded_experts(config: AppConfig, path: Path) -> int:
    """Experts of each layer of the model, where the rollout records those of each token; else 0."""
    found = RoutedLayers.of(read_json(path / "config.json", str(path)))
    return found.experts if found is not None and config.algorithm.router_replay == "R3" else 0


def _reader(path: Path, vision: Vision | None) -> ImageReader | None:
    """The image reader of a vision model; None: the model reads text only."""
    if vision is None:
        return None
    from rl_trainer.rollout.image_reader import FolderImageReader  # torch: the reward process needs none

    return FolderImageReader(path, vision)


def _generator(config: AppConfig, path: Path) -> RolloutEngine:
    rollout = config.rollout
    setup = RolloutSetup(
        path=path,
        rollout=rollout,
        lora=config.lora if config.sends_adapters else None,
        threads=config.trainer.threads_per_worker
        or cores_of_each(rollout.num_workers * rollout.tensor_model_parallel_size),
        start_timeout_s=config.ray.start_timeout_s,
        call_timeout_s=config.trainer.stage_timeout_s,
        interruptible=config.async_rl.on_update != "finish" or config.async_rl.when_stale == "drop",
    )
    built = cast("object", config.generator.build(setup))  # of a plug-in
    if not isinstance(built, RolloutEngine):
        raise ConfigError(
            f"rollout.name={rollout.name!r}: {type(config.generator).__qualname__}.build must return a RolloutEngine; "
            f"got {type(built).__name__}."
        )
    return built


def build_torch(
    config: AppConfig, call: BuildCall, plane: DataPlane, columns: StepColumns, meeting: Rendezvous
) -> Build:
    """Builder of model_engine=torch: the whole model in this process."""
    from rl_trainer.backends.parallel_strategy import PlainStrategy  # torch: the reward process needs none
    from rl_trainer.backends.world import device_of

    del meeting  # it has one rank
    options = config.engine_as(TorchConfig)
    return _TrainedRoles(PlainStrategy(options, device_of(options.device)), config, call, plane, columns)


def build_fsdp(
    config: AppConfig, call: BuildCall, plane: DataPlane, columns: StepColumns, meeting: Rendezvous
) -> Build:
    """Builder of model_engine=fsdp: joins the ranks, over which FSDP2 shards each model."""
    from rl_trainer.backends.parallel_strategy import FsdpStrategy
    from rl_trainer.backends.world import device_of, join_world

    options = config.engine_as(FsdpConfig)
    world = join_world(
        meeting,
        device=device_of(options.trains_on),
        timeout_s=config.trainer.stage_timeout_s,
        join_timeout_s=join_timeout_s(config),
    )
    return _TrainedRoles(FsdpStrategy(options, world), config, call, plane, columns)


class _TrainedRoles:
    """Builds the roles of a process on torch models that the strategy places, the actor last."""

    def __init__(
        self,
        strategy: ParallelStrategy,
        config: AppConfig,
        call: BuildCall,
        plane: DataPlane,
        columns: StepColumns,
    ) -> None:
        self._strategy = strategy
        self._config = config
        self._call = call
        self._plane = plane
        self._columns = columns
        self._critic: TorchCriticBackend | None = None

    def __call__(self, role: Role, generator: RolloutEngine | None) -> Built:
        """The worker of a trained role; `generator` is the rollout engine of this process, or
        None."""
        from rl_trainer.backends.snapshot import seed_generators  # torch: the reward process needs none

        seed_generators(self._config.trainer.seed, self._call.rank, TRAINED.index(role))
        match role:
            case "critic":
                return self._build_critic(), None
            case "ref":
                return self._build_reference(), None
            case _:
                return self._build_actor(generator)

    def _build_critic(self) -> CriticWorker:
        from rl_trainer.backends.torch_critic import TorchCriticBackend

        config, call = self._config, self._call
        adapters = replace(config.lora, adapter_path=call.critic_adapter_path) if config.critic.use_lora else None
        with adapter_errors("critic.adapter_path"):
            self._critic = TorchCriticBackend(
                Path(call.model_path),
                config.critic,
                lora=adapters,
                rollout_n=config.rollout.n,
                seed=config.trainer.seed,
                strategy=self._strategy,
            )
        return CriticWorker(self._plane, self._columns, self._critic, self._meter("critic"))

    def _build_reference(self) -> ReferenceWorker:
        from rl_trainer.backends.torch_policy import PolicyOptions, TorchPolicyBackend

        config, call = self._config, self._call
        reference = TorchPolicyBackend(
            call.reference_path or call.model_path,
            config.actor,
            strategy=self._strategy,
            options=PolicyOptions(frozen=True, top=config.actor.kl_loss_topk),
        )
        return ReferenceWorker(self._plane, self._columns, reference, config.rollout.temperature)

    def _build_actor(self, generator: RolloutEngine | None) -> Built:
        from rl_trainer.backends.torch_policy import PolicyOptions, TorchPolicyBackend

        config, call = self._config, self._call
        policy = TorchPolicyBackend(
            call.model_path,
            config.actor,
            lora=replace(config.lora, adapter_path=call.adapter_path),
            rollout_n=config.rollout.n,
            seed=config.trainer.seed,
            strategy=self._strategy,
            options=PolicyOptions(
                correction=loss_correction(config.algorithm),
                sum_pi_squared=needs_sum_pi_squared(config.algorithm),
                top=config.actor.kl_loss_topk,
                replays_experts=config.algorithm.router_replay != "disabled",
                records_experts=config.algorithm.router_replay == "R2",
                teacher_ema=config.algorithm.teacher_ema,
                sent_as=config.rollout.dtype,
                sends=sends_weights(config, call),
            ),
        )
        if shares_base(config) and isinstance(generator, SharesBase):
            generator.share_base(policy.base_weights())
        if self._critic is not None and critic_shares_base(config):
            self._critic.share_base(policy.base_weights())
        worker = ActorWorker(
            self._plane,
            self._columns,
            policy,
            config.rollout.temperature,
            teacher_is_policy=config.algorithm.teacher_is_policy,
            meter=self._meter("actor"),
        )
        return worker, sender_of(config, call, policy)

    def _meter(self, role: Role) -> UpdateMeter | None:
        from rl_app_ppo.worker.update_meter import meter_of  # torch: the reward process needs none

        return meter_of(role, self._config, Path(self._call.model_path), self._strategy.device)


def weight_engine(config: AppConfig, call: BuildCall) -> CheckpointEngine:
    """The engine of one end of the weight sync.

    Where processes are on several hosts it listens at the address of its own host, unless
    checkpoint_engine.listen is another one than loopback.

    Raises:
        ConfigError: a setting does not fit; the key of the engine is missing.
    """
    return make_engine(listening_in(call.weights, config.checkpoint_engine), call.plugins)


def sender_of(config: AppConfig, call: BuildCall, policy: TrainedPolicy) -> Endpoint:
    """The actor's endpoint: all ranks gather the weights, and the first sends them.

    Where each rank has a rollout in its process, each sends them to its own.
    """
    adapters = config.sends_adapters
    source = AdapterOnly(policy) if adapters else policy
    if not sends_weights(config, call):
        return FollowerEndpoint(source)
    engine = weight_engine(config, call)
    if adapters:
        # a step without informative responses does not change the adapter
        return SenderEndpoint(engine, source, kind="lora", must_change=False)
    return SenderEndpoint(engine, source, dtype=config.rollout.dtype)


def sends_weights(config: AppConfig, call: BuildCall) -> bool:
    """Whether this rank of the actor sends the weights."""
    return not call.rank or rollout_in_actor(config.placement)
