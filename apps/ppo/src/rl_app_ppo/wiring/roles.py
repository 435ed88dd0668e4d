"""Inside a worker process: the concrete worker of each role."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from rl_app_ppo.config import from_yaml
from rl_app_ppo.demo.demos import DEMOS
from rl_app_ppo.rewards import open_scorer
from rl_app_ppo.runtime.messages import BuildCall, Role
from rl_app_ppo.schema import AppConfig
from rl_app_ppo.wiring.changes import AdapterOnly, AdapterSource, MeasuredSender
from rl_app_ppo.wiring.data import codec, decoder, load_tokenizer, open_data, vision_of
from rl_app_ppo.wiring.weights import FollowingSender, WeightEnd, make_engine
from rl_ckpt_engine import ReceiverEndpoint
from rl_protocol.ports import DataPlane, PolicyBackend, RolloutEngine, SamplingParams
from rl_rollout_vllm import RANKS, AdapterConfig, VLLMConfig, VLLMRolloutEngine, required_logprobs_mode
from rl_trainer import (
    ActorWorker,
    CriticWorker,
    LoraConfig,
    ReferenceWorker,
    RewardWorker,
    RolloutWorker,
    StepGraph,
    Worker,
    build_graph,
    needs_sum_pi_squared,
)
from rl_trainer.pixels import ImageReader
from rl_trainer.sample_log import SampleLog, TrainSamples
from rl_transferqueue import PlaneDescriptor, connect

if TYPE_CHECKING:
    from rl_trainer.backends.engine import ModelEngine


class TrainedPolicy(PolicyBackend, AdapterSource, Protocol):
    """What every training engine makes."""


Built = tuple[Worker, WeightEnd | None]


async def build(role: Role, call: BuildCall) -> Built:
    """Connect to the data plane, load the models of the role, and make its worker and its end of the weight synchronisation."""
    config, path = from_yaml(call.config), Path(call.model_path)
    plane = await connect(msgspec.json.decode(call.plane, type=PlaneDescriptor))
    graph = build_graph(config.algorithm, config.actor, images=vision_of(path) is not None)
    if role == "reward":
        decode = decoder(load_tokenizer(path))
        scorer = await open_scorer(config.reward, path)
        note = "" if config.data.train_files else DEMOS[config.data.demo].note
        worker = RewardWorker(
            plane,
            graph,
            scorer,
            decode,
            config.algorithm,
            config.rollout.response_length,
            policy_loss=config.actor.policy_loss,
            overlong=config.reward.overlong,
            samples=SampleLog(Path(call.samples), note=note) if call.samples else None,
            train_samples=TrainSamples(SampleLog(Path(call.samples), "train-", note=note), config.trainer.test_freq)
            if call.samples
            else None,
            seed=config.trainer.seed,
        )
        return worker, None
    if role == "rollout":
        return _rollout(config, call, plane)
    return _trained(role, config, call, plane, graph)


def _rollout(config: AppConfig, call: BuildCall, plane: DataPlane) -> Built:
    path = Path(call.model_path)
    engine = _generator(config, path)
    receiver = ReceiverEndpoint(make_engine(config.checkpoint_engine, call.plugins), engine)
    data, session = open_data(config, path), config.rollout.session
    return RolloutWorker(plane, engine, data, session, codec(load_tokenizer(path)), _reader(path)), receiver


def _reader(path: Path) -> ImageReader | None:
    """What shows the policy its images, where it sees any."""
    vision = vision_of(path)
    if vision is None:
        return None
    from rl_trainer.rollout.images import FolderImageReader  # torch: the reward process does without it

    return FolderImageReader(path, vision)


def _generator(config: AppConfig, path: Path) -> RolloutEngine:
    rollout = config.rollout
    if rollout.name == "hf":
        from rl_trainer.rollout.hf import HFRolloutEngine  # torch: the reward process does without it

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
            threads=config.trainer.threads_per_worker,
            tensor_parallel_size=rollout.tensor_model_parallel_size,
            adapter=room_for_adapters(config.lora) if config.sends_adapters else None,
            start_timeout_s=config.ray.start_timeout_s,
            call_timeout_s=config.trainer.stage_timeout_s,
        )
    )


def room_for_adapters(lora: LoraConfig) -> AdapterConfig:
    """What vLLM reserves for the adapters of a run."""
    return AdapterConfig(
        rank=min(rank for rank in RANKS if rank >= lora.rank),
        alpha=lora.scaling * lora.rank,  # it divides by the rank, also where rsLoRA divides by its root
        target_modules=lora.targets(),
    )


def _trained(role: Role, config: AppConfig, call: BuildCall, plane: DataPlane, graph: StepGraph) -> Built:
    temperature = config.rollout.temperature
    policy: TrainedPolicy
    if config.model_engine == "megatron":
        from rl_app_ppo.wiring.megatron import (  # Megatron comes with an extra of its own
            megatron_critic,
            megatron_policy,
        )

        if role == "critic":
            value = megatron_critic(config, Path(call.model_path), rank=call.rank, store=Path(call.store))
            return CriticWorker(plane, graph, value), None
        policy = megatron_policy(config, Path(call.model_path), rank=call.rank, store=Path(call.store))
        if role == "ref":
            return ReferenceWorker(plane, graph, policy, temperature), None
        return ActorWorker(plane, graph, policy, temperature), _sender(config, call, policy)
    from rl_trainer.backends.state import seed_generators  # torch: the reward process does without it
    from rl_trainer.backends.torch_critic import TorchCriticBackend
    from rl_trainer.backends.torch_policy import TorchPolicyBackend

    path, engine = Path(call.model_path), _engine(config, call)
    n, seed = config.rollout.n, config.trainer.seed
    seed_generators(seed, call.rank, ("actor", "ref", "critic").index(role))
    if role == "critic":
        critic = TorchCriticBackend(path, config.critic, rollout_n=n, seed=seed, engine=engine)
        return CriticWorker(plane, graph, critic), None
    if role == "ref":
        reference = TorchPolicyBackend(path, config.actor, engine=engine, frozen=True)
        return ReferenceWorker(plane, graph, reference, temperature), None
    policy = TorchPolicyBackend(
        path,
        config.actor,
        lora=config.lora,
        correction=config.algorithm.rollout_correction,
        sum_pi_squared=needs_sum_pi_squared(config.algorithm),
        rollout_n=n,
        seed=seed,
        engine=engine,
    )
    return ActorWorker(plane, graph, policy, temperature), _sender(config, call, policy)


def _sender(config: AppConfig, call: BuildCall, policy: TrainedPolicy) -> WeightEnd:
    """The actor's end of the weight synchronisation: the first rank sends what all of them put together."""
    adapters = config.sends_adapters
    source = AdapterOnly(policy) if adapters else policy
    if call.rank:
        return FollowingSender(source)
    engine = make_engine(config.checkpoint_engine, call.plugins)
    if adapters:
        return MeasuredSender(engine, source, kind="lora")
    return MeasuredSender(engine, source, dtype=config.rollout.dtype)


def _engine(config: AppConfig, call: BuildCall) -> ModelEngine:
    from rl_trainer.backends.engine import FsdpEngine, PlainEngine, resolve_device
    from rl_trainer.backends.world import join_world

    if config.model_engine == "torch":
        return PlainEngine()
    world = join_world(
        call.rank,
        config.ranks,
        store=Path(call.store),
        device=resolve_device(config.fsdp.device),
        timeout_s=config.trainer.stage_timeout_s,
    )
    return FsdpEngine(config.fsdp, world)
