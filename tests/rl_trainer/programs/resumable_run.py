"""A small training run with checkpoints, in one process.

As a program, with arguments MODEL FOLDER SCENARIO STEPS OUT: resume from the newest complete
checkpoint in FOLDER, save after every step, and write the final weights to OUT.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
import torch
from replay_buffers import make_buffers, opened
from transformers.utils import logging as transformers_logging

from rl_protocol.ports import WeightSyncReport
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_protocol.torch import from_weight
from rl_trainer import (
    ActorConfig,
    ActorWorker,
    AlgorithmConfig,
    CriticConfig,
    CriticWorker,
    KLControlConfig,
    LoopConfig,
    LoraConfig,
    OptimConfig,
    PPOTrainer,
    PromptOrder,
    PromptRow,
    ReferenceWorker,
    RewardSettings,
    RewardWorker,
    RolloutConfig,
    RolloutWorker,
    TrainerParts,
    Workers,
    build_graph,
    step_columns,
)
from rl_trainer.backends.torch_critic import TorchCriticBackend
from rl_trainer.backends.torch_policy import TorchPolicyBackend
from rl_trainer.checkpoints.checkpoint_folder import newest_whole
from rl_trainer.config import AsyncConfig
from rl_trainer.data.curricula.scored import TargetScore
from rl_trainer.data.curricula.scored_order import ScoredOrder
from rl_trainer.driver.checkpoint_writer import CheckpointWriter
from rl_trainer.driver.trainer_parts import BatchFolder
from rl_trainer.rewards import InlineScorer
from rl_trainer.rollout.hf_engine import HFRolloutEngine

OPTIM = OptimConfig(lr=3e-3, lr_warmup_steps=2, lr_scheduler_type="cosine", lr_decay_steps=30, min_lr_ratio=0.1)
SCENARIOS = {
    "gae": {"estimator": "gae", "kl": KLControlConfig(type="adaptive", kl_coef=0.5, target_kl=1e-3, horizon=64)},
    "rae": {"estimator": "rae"},
    "lora": {"lora": LoraConfig(rank=4, alpha=8, dropout=0.2)},
    "curriculum": {"curriculum": "odd_first"},
    "scores": {"curriculum": "target_score"},
    "asynchronous": {"bound": 2, "curriculum": "target_score"},
}
"""Options of `Run`: a critic with adaptive KL control, means of roles, LoRA with dropout, a
curriculum without and with scores, sampling that runs ahead.

The dropout draws from the random state of the process.
"""


class Digits:
    """Prompts "00".."19"; the right answer is the last digit."""

    def __len__(self):
        return 20

    def __getitem__(self, row):
        ids = tuple(2 + int(c) for c in f"{row:02d}")
        return PromptRow(prompt_ids=ids, data_source="digits", ground_truth=str(row % 10))


class OddFirst:
    """A curriculum of odd answers before even ones, reversed in every second epoch.

    Each half is shuffled in every epoch.
    """

    def __init__(self, rows):
        self._odd = np.array([int(rows[i].ground_truth) % 2 for i in range(len(rows))])

    def epoch(self, number, rng):
        return np.lexsort((rng.random(self._odd.size), self._odd == number % 2))


class LocalWorker:
    """A WorkerHandle in this process."""

    def __init__(self, name, worker):
        self.name, self.worker, self.bytes_moved, self.process = name, worker, 0, self

    async def call(self, method, payload, *, timeout_s):
        answer = await self.worker.handle(method, payload)
        self.bytes_moved += len(payload) + len(answer)
        return answer


class DirectSync:
    """Weight sync that loads the policy's weights directly into the engine."""

    def __init__(self, policy, engine):
        self.policy, self.engine, self.versions = policy, engine, []

    async def update_weights(self, version):
        self.engine.load_weights(list(self.policy.named_weights()), version)
        self.versions.append(version)
        return WeightSyncReport(version=version, num_bytes=1, seconds=0.0, receivers=("r",))


class Run:
    """A complete run; `folder` is for its checkpoints and `batches` for the batches of its steps,
    None disables them."""

    def __init__(
        self,
        path,
        folder,
        *,
        steps,
        save_freq=1,
        keep=0,
        estimator="grpo",
        lora=None,
        kl=None,
        validate=0,
        hooks=None,
        curriculum="",
        bound=0,
        batches=None,
        keep_batches=-1,
    ):
        more = {"use_kl_in_reward": True, "kl_ctrl": kl} if kl else {}
        algorithm = AlgorithmConfig(adv_estimator=estimator, old_log_prob="recompute" if bound else "auto", **more)
        actor = ActorConfig(optim=OPTIM, ppo_mini_batch_size=2, use_kl_loss=True)
        critic = CriticConfig(optim=OPTIM, ppo_mini_batch_size=2, warmup_steps=1)
        rollout = RolloutConfig(n=4, response_length=3, num_workers=1)
        graph, columns, plane = build_graph(algorithm, actor), step_columns(algorithm, actor), MemoryDataPlane()
        self.policy = TorchPolicyBackend(path, actor, lora=lora, rollout_n=4)
        self.critic = TorchCriticBackend(path, critic, rollout_n=4, seed=0) if estimator == "gae" else None
        engine = HFRolloutEngine(path)
        data = {"train": Digits(), "val": Digits()}
        actors = [LocalWorker("actor", ActorWorker(plane, columns, self.policy, 1.0))]
        reference = ReferenceWorker(plane, columns, TorchPolicyBackend(path, None), 1.0)
        reward = RewardWorker(
            plane,
            columns,
            InlineScorer(starts_right),
            decode,
            RewardSettings(algorithm=algorithm, response_length=3, policy_loss=actor.policy_loss),
        )
        workers = Workers(
            rollout=[LocalWorker("rollout-0", RolloutWorker(plane, engine, data))],
            reward=LocalWorker("reward", reward),
            actor=actors,
            ref=actors if lora else [LocalWorker("ref", reference)],
            critic=[LocalWorker("critic", CriticWorker(plane, columns, self.critic))] if self.critic else [],
        )
        self.folder, self.workers, self.sync = folder, workers, DirectSync(self.policy, engine)
        self.metrics = {}
        writer = None
        if folder is not None:
            writer = CheckpointWriter(folder, config="a: 1\n", keep=keep, workers=workers, timeout_s=60)
        self.plane, self.buffers = plane, make_buffers(plane, max_staleness=bound)
        self.parts = TrainerParts(
            graph=graph,
            plane=plane,
            buffers=self.buffers,
            workers=workers,
            weight_sync=self.sync,
            train_order=order(data["train"], curriculum),
            validation_size=20,
            rollout=rollout,
            actor=actor,
            critic=critic,
            loop=LoopConfig(
                total_training_steps=steps,
                test_freq=validate,
                save_freq=save_freq,
                stage_timeout_s=60,
                deterministic=bool(bound),
                keep_batches=keep_batches,
            ),
            async_rl=AsyncConfig(max_staleness=bound),
            on_step=lambda step, metrics: self.metrics.__setitem__(step, dict(metrics)),
            checkpoints=writer,
            hooks=hooks or {},
            batches=BatchFolder(batches, "a: 1\n") if batches is not None else None,
        )
        self.trainer = PPOTrainer(self.parts)

    def fit(self):
        """Train to the end, from the newest complete checkpoint if there is one."""

        async def work():
            found, self.skipped = newest_whole(self.folder) if self.folder is not None else (None, {})
            async with opened(self.buffers):
                if found is not None:
                    await self.trainer.resume(found)
                return await self.trainer.fit()

        return asyncio.run(work())

    def weights(self):
        """Return all trained weights."""
        found = {w.name: from_weight(w).numpy().copy() for w in self.policy.named_weights()}
        if self.critic is not None:
            found |= {f"critic/{name}": t.numpy().copy() for name, t in self.critic._model.state_dict().items()}
        return found


def order(rows, curriculum):
    if curriculum == "target_score":
        return ScoredOrder(["digits"] * 20, 4, 0, TargetScore(), target=0.25)
    return PromptOrder(20, 4, 0, OddFirst(rows) if curriculum else None)


def starts_right(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.startswith(ground_truth))


def decode(ids):
    return "".join("0123456789+="[i - 2] if i > 1 else "" for i in ids)


def main() -> None:
    path, folder, scenario, steps, out = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(3)
    transformers_logging.disable_progress_bar()
    run = Run(Path(path), Path(folder), steps=int(steps), **SCENARIOS[scenario])
    run.fit()
    np.savez(out, **run.weights())


if __name__ == "__main__":
    main()
