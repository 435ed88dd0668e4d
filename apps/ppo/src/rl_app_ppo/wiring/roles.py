"""Inside a worker process: the concrete worker of each role."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rl_app_ppo.config import from_yaml
from rl_app_ppo.rewards import load_reward
from rl_app_ppo.runtime.messages import BuildCall, Role
from rl_app_ppo.schema import AppConfig
from rl_app_ppo.wiring.data import datasets, decoder, load_tokenizer
from rl_ckpt_engine import CheckpointEngineRegistry, ReceiverEndpoint, SenderEndpoint
from rl_protocol.ports import DataPlane
from rl_trainer import (
    ActorWorker,
    CriticWorker,
    ReferenceWorker,
    RewardWorker,
    RolloutWorker,
    StepGraph,
    Worker,
    build_graph,
    needs_sum_pi_squared,
)
from rl_transferqueue import PlaneDescriptor, connect

Built = tuple[Worker, SenderEndpoint | ReceiverEndpoint | None]


async def build(role: Role, call: BuildCall) -> Built:
    """Connect to the data plane, load the models of the role, and make its worker and its end of the weight synchronisation."""
    config, path = from_yaml(call.config), Path(call.model_path)
    plane = await connect(msgspec.json.decode(call.plane, type=PlaneDescriptor))
    graph = build_graph(config.algorithm, config.actor)
    if role == "reward":
        decode = decoder(load_tokenizer(path))
        reward = load_reward(config.reward.function)
        worker = RewardWorker(
            plane,
            graph,
            reward,
            decode,
            config.algorithm,
            config.rollout.response_length,
            policy_loss=config.actor.policy_loss,
            seed=config.trainer.seed,
        )
        return worker, None
    if role == "rollout":
        return _rollout(config, path, plane)
    return _trained(role, config, path, plane, graph)


def _rollout(config: AppConfig, path: Path, plane: DataPlane) -> Built:
    from rl_trainer.rollout.hf import HFRolloutEngine  # torch: the reward process does without it

    engine = HFRolloutEngine(path, max_batch_size=config.rollout.max_batch_size)
    receiver = ReceiverEndpoint(CheckpointEngineRegistry().create(config.checkpoint_engine.backend), engine)
    return RolloutWorker(plane, engine, datasets(config.data, load_tokenizer(path))), receiver


def _trained(role: Role, config: AppConfig, path: Path, plane: DataPlane, graph: StepGraph) -> Built:
    from rl_trainer.backends.torch_critic import TorchCriticBackend  # torch: the reward process does without it
    from rl_trainer.backends.torch_policy import TorchPolicyBackend

    n, seed, temperature = config.rollout.n, config.trainer.seed, config.rollout.temperature
    if role == "critic":
        return CriticWorker(plane, graph, TorchCriticBackend(path, config.critic, rollout_n=n, seed=seed)), None
    if role == "ref":
        return ReferenceWorker(plane, graph, TorchPolicyBackend(path, None), temperature), None
    policy = TorchPolicyBackend(
        path,
        config.actor,
        correction=config.algorithm.rollout_correction,
        sum_pi_squared=needs_sum_pi_squared(config.algorithm),
        rollout_n=n,
        seed=seed,
    )
    sender = SenderEndpoint(CheckpointEngineRegistry().create(config.checkpoint_engine.backend), policy)
    return ActorWorker(plane, graph, policy, temperature), sender
