"""Build the worker of each role from concrete classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from rl_app_ppo.config.loading import from_yaml
from rl_app_ppo.config.placement import Role, shares_base, shares_weights
from rl_app_ppo.config.schema import AppConfig
from rl_app_ppo.demo.demos import DEMOS
from rl_app_ppo.inputs.data import open_data
from rl_app_ppo.inputs.tokenizer import decoder, load_tokenizer, session_tokenizer, vision_of
from rl_app_ppo.worker.cores import cores_of_each
from rl_app_ppo.worker.messages import BuildCall
from rl_app_ppo.worker.rewards import open_scorer
from rl_app_ppo.worker.weight_endpoints import AdapterOnly, AdapterSource, make_engine
from rl_ckpt_engine import FollowerEndpoint, ReceiverEndpoint, SenderEndpoint
from rl_ckpt_engine.endpoints.operations import Endpoint
from rl_protocol.ports import DataPlane, PolicyBackend, RolloutEngine, SamplingParams
from rl_rollout_vllm import RANKS, AdapterConfig, VLLMConfig, VLLMRolloutEngine, required_logprobs_mode
from rl_trainer import (
    ActorWorker,
    CriticWorker,
    LoraConfig,
    ReferenceWorker,
    RewardSettings,
    RewardWorker,
    RolloutWorker,
    StepColumns,
    Worker,
    needs_sum_pi_squared,
    step_columns,
)
from rl_trainer.algorithms.old_log_prob import loss_correction
from rl_trainer.data.image_columns import ImageReader
from rl_trainer.workers.sample_log import SampleLog, TrainSamples
from rl_transferqueue import PlaneDescriptor, connect

if TYPE_CHECKING:
    from rl_trainer.backends.parallel_strategy import ParallelStrategy


class TrainedPolicy(PolicyBackend, AdapterSource, Protocol):
    """The policy of every training engine."""


Built = tuple[Worker, Endpoint | None]
Build = Callable[[Role, RolloutEngine | None], Built]
"""Builds the worker of a trained role; the second argument is the process's own rollout engine."""
TRAINED: tuple[Role, ...] = ("actor", "ref", "critic")
"""The roles whose ranks share a model."""


async def build_workers(roles: Sequence[Role], call: BuildCall) -> dict[Role, Built]:
    """Connect to the data plane, load the models of the roles of a process, create their workers.

    Returns:
        The worker of each role, and its endpoint of the weight synchronization.
    """
    config, path = from_yaml(call.config), Path(call.model_path)
    plane = await connect(msgspec.json.decode(call.plane, type=PlaneDescriptor))
    columns = step_columns(config.algorithm, config.actor, images=vision_of(path) is not None)
    build = BUILDERS[config.model_engine](config, call, plane, columns) if set(roles) & set(TRAINED) else None
    built: dict[Role, Built] = {}
    generator: RolloutEngine | None = None
    for role in reversed(roles):  # the actor last: the generators continue from its seed
        if role == "reward":
            built[role] = await _reward(config, call, plane, columns), None
        elif role == "rollout":
            generator = _generator(config, path)
            built[role] = _rollout(config, call, plane, generator)
        elif build is not None:
            built[role] = build(role, generator)
    if shares_weights(config) and "actor" in built and "rollout" in built:
        await _share_weights(built["actor"][1], built["rollout"][1], config.checkpoint_engine.timeout_s)
    return built


async def _share_weights(sender: Endpoint | None, receiver: Endpoint | None, timeout_s: float) -> None:
    """Replace the weights that the rollout has loaded by the actor's own: version 0."""
    if isinstance(sender, SenderEndpoint) and isinstance(receiver, ReceiverEndpoint):
        sent = await sender.send(0, timeout_s)
        await receiver.receive(sent.manifest, timeout_s)
        await receiver.activate(0, timeout_s)
        await sender.finalize(0)


async def _reward(config: AppConfig, call: BuildCall, plane: DataPlane, columns: StepColumns) -> Worker:
    path = Path(call.model_path)
    note = "" if config.data.train_files else DEMOS[config.data.demo].note
    return RewardWorker(
        plane,
        columns,
        await open_scorer(config.reward, path),
        decoder(load_tokenizer(path)),
        RewardSettings(
            algorithm=config.algorithm,
            response_length=config.rollout.response_length,
            policy_loss=config.actor.policy_loss,
            overlong=config.reward.overlong,
            seed=config.trainer.seed,
        ),
        samples=SampleLog(Path(call.samples), note=note) if call.samples else None,
        train_samples=TrainSamples(SampleLog(Path(call.samples), "train-", note=note), config.trainer.test_freq)
        if call.samples
        else None,
    )


def _rollout(config: AppConfig, call: BuildCall, plane: DataPlane, engine: RolloutEngine) -> Built:
    path = Path(call.model_path)
    receiver = ReceiverEndpoint(make_engine(config.checkpoint_engine, call.plugins), engine)
    data, session = open_data(config, path), config.rollout.session
    return RolloutWorker(plane, engine, data, session, session_tokenizer(load_tokenizer(path)), _reader(path)), receiver


def _reader(path: Path) -> ImageReader | None:
    """The image reader of a vision model; None: the model reads text only."""
    vision = vision_of(path)
    if vision is None:
        return None
    from rl_trainer.rollout.image_reader import FolderImageReader  # torch: the reward process needs none

    return FolderImageReader(path, vision)


def _generator(config: AppConfig, path: Path) -> RolloutEngine:
    rollout = config.rollout
    if rollout.name == "hf":
        from rl_trainer.rollout.hf_engine import HFRolloutEngine  # torch: the reward process needs none

        lora = config.lora if config.sends_adapters else None
        return HFRolloutEngine(path, max_batch_size=rollout.max_batch_size, dtype=rollout.dtype, lora=lora)
    sampling = SamplingParams(
        max_new_tokens=rollout.response_length,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
    )
    return VLLMRolloutEngine(
        VLLMConfig(
            model_path=str(path),
            dtype="bfloat16" if rollout.dtype == "bfloat16" else "float32",
            max_num_seqs=rollout.max_batch_size,
            kv_cache_bytes=rollout.kv_cache_mb << 20,
            logprobs_mode=required_logprobs_mode(sampling) or "processed_logprobs",
            threads=config.trainer.threads_per_worker
            or cores_of_each(rollout.num_workers * rollout.tensor_model_parallel_size),
            tensor_parallel_size=rollout.tensor_model_parallel_size,
            adapter=room_for_adapters(config.lora) if config.sends_adapters else None,
            start_timeout_s=config.ray.start_timeout_s,
            call_timeout_s=config.trainer.stage_timeout_s,
        )
    )


def room_for_adapters(lora: LoraConfig) -> AdapterConfig:
    """The adapters for which vLLM reserves memory."""
    return AdapterConfig(
        rank=min(rank for rank in RANKS if rank >= lora.rank),
        alpha=lora.scaling * lora.rank,  # vLLM divides by the rank, also with rsLoRA, which divides by its root
        target_modules=lora.targets(),
    )


def _megatron(config: AppConfig, call: BuildCall, plane: DataPlane, columns: StepColumns) -> Build:
    from rl_app_ppo.worker.megatron import megatron_critic, megatron_policy  # an optional dependency

    path, store = Path(call.model_path), Path(call.store)

    def build(role: Role, _: RolloutEngine | None) -> Built:
        if role == "critic":
            return CriticWorker(plane, columns, megatron_critic(config, path, rank=call.rank, store=store)), None
        temperature = config.rollout.temperature
        policy = megatron_policy(config, path, rank=call.rank, store=store)
        if role == "ref":
            return ReferenceWorker(plane, columns, policy, temperature), None
        return ActorWorker(plane, columns, policy, temperature), _sender(config, call, policy)

    return build


def _torch(config: AppConfig, call: BuildCall, plane: DataPlane, columns: StepColumns) -> Build:
    from rl_trainer.backends.parallel_strategy import PlainStrategy  # torch: the reward process needs none

    strategy = PlainStrategy(config.torch)
    return partial(_trained, config, call, plane, columns, strategy)


def _fsdp(config: AppConfig, call: BuildCall, plane: DataPlane, columns: StepColumns) -> Build:
    from rl_trainer.backends.parallel_strategy import FsdpStrategy, resolve_device
    from rl_trainer.backends.world import join_world

    world = join_world(
        call.rank,
        config.ranks,
        store=Path(call.store),
        device=resolve_device(config.fsdp.device),
        timeout_s=config.trainer.stage_timeout_s,
    )
    strategy = FsdpStrategy(config.fsdp, world)
    return partial(_trained, config, call, plane, columns, strategy)


BUILDERS: Mapping[str, Callable[[AppConfig, BuildCall, DataPlane, StepColumns], Build]] = {
    "torch": _torch,
    "fsdp": _fsdp,
    "megatron": _megatron,
}
"""Value of `model_engine` -> joins the ranks of a process, and builds the workers of its roles."""


def _trained(
    config: AppConfig,
    call: BuildCall,
    plane: DataPlane,
    columns: StepColumns,
    strategy: ParallelStrategy,
    role: Role,
    generator: RolloutEngine | None,
) -> Built:
    """The worker of a trained role; `generator` is the rollout engine in this process, if any."""
    from rl_trainer.backends.snapshot import seed_generators  # torch: the reward process needs none
    from rl_trainer.backends.torch_critic import TorchCriticBackend
    from rl_trainer.backends.torch_policy import PolicyOptions, TorchPolicyBackend
    from rl_trainer.rollout.hf_engine import HFRolloutEngine

    path, temperature = Path(call.model_path), config.rollout.temperature
    n, seed = config.rollout.n, config.trainer.seed
    seed_generators(seed, call.rank, TRAINED.index(role))
    if role == "critic":
        critic = TorchCriticBackend(path, config.critic, rollout_n=n, seed=seed, strategy=strategy)
        return CriticWorker(plane, columns, critic), None
    if role == "ref":
        reference = TorchPolicyBackend(path, config.actor, strategy=strategy, options=PolicyOptions(frozen=True))
        return ReferenceWorker(plane, columns, reference, temperature), None
    policy = TorchPolicyBackend(
        path,
        config.actor,
        lora=config.lora,
        rollout_n=n,
        seed=seed,
        strategy=strategy,
        options=PolicyOptions(
            correction=loss_correction(config.algorithm),
            sum_pi_squared=needs_sum_pi_squared(config.algorithm),
        ),
    )
    if shares_base(config) and isinstance(generator, HFRolloutEngine):
        generator.share_base(policy.base_weights())
    return ActorWorker(plane, columns, policy, temperature), _sender(config, call, policy)


def _sender(config: AppConfig, call: BuildCall, policy: TrainedPolicy) -> Endpoint:
    """The actor's endpoint: all ranks gather the weights, and the first sends them."""
    adapters = config.sends_adapters
    source = AdapterOnly(policy) if adapters else policy
    if call.rank:
        return FollowerEndpoint(source)
    engine = make_engine(config.checkpoint_engine, call.plugins)
    if adapters:
        # a step without informative responses does not change the adapter
        return SenderEndpoint(engine, source, kind="lora", must_change=False)
    return SenderEndpoint(engine, source, dtype=config.rollout.dtype)
