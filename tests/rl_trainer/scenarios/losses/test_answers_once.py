"""A step of two data sources: responses with rewards, and answers that are trained on once."""

from __future__ import annotations

import asyncio
from statistics import fmean, stdev

import msgspec
import pytest
import torch
from replay_buffers import make_buffers, opened
from transformers import AutoModelForCausalLM

from rl_protocol import RowKey
from rl_protocol.rl_columns import TRAIN_PARTITION, prompt_partition
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_trainer import (
    ActorConfig,
    ActorWorker,
    AlgorithmConfig,
    CriticConfig,
    LoopConfig,
    OptimConfig,
    PPOTrainer,
    PromptOrder,
    PromptRow,
    RewardSettings,
    RewardWorker,
    RolloutConfig,
    RolloutWorker,
    Tokenizer,
    TrainerParts,
    Workers,
    build_graph,
    step_columns,
)
from rl_trainer.backends.torch_policy import TorchPolicyBackend
from rl_trainer.rewards import InlineScorer
from rl_trainer.rollout.demonstrations import Demonstrations
from rl_trainer.rollout.hf_engine import HFRolloutEngine
from rl_trainer.workers.messages import StageCall

pytestmark = pytest.mark.numeric

N, LETTERS = 4, "0123456789+="
ALGORITHM = AlgorithmConfig(
    by_source=("rl_coef=0@answers", "sft_coef=1@answers"), adv_estimator="grpo", old_log_prob="recompute"
)
ROWS = [
    PromptRow(prompt_ids=(2, 3), data_source="rewards", ground_truth=""),
    PromptRow(prompt_ids=(4,), data_source="answers", ground_truth="123"),
    PromptRow(prompt_ids=(5, 6, 7), data_source="rewards", ground_truth=""),
    PromptRow(prompt_ids=(3, 5), data_source="answers", ground_truth="7"),
]


def decode(ids):
    return "".join(LETTERS[i - 2] for i in ids if 2 <= i < 2 + len(LETTERS))


def score(data_source, solution_str, ground_truth, extra_info=None):
    """Different for most responses."""
    return float(sum(map(ord, solution_str)) % 11)


class Local:
    """A WorkerHandle in this process; keeps what it reads of the update."""

    def __init__(self, name, worker, plane):
        self.name, self.worker, self.plane, self.bytes_moved, self.process = name, worker, plane, 0, self

    async def call(self, method, payload, *, timeout_s):
        if method == "update_actor":
            self.batch = msgspec.msgpack.decode(payload, type=StageCall).batch
            self.data = await self.plane.get(self.batch, ["responses", "ce_weights", "rl_weights"])
            listed = await self.plane.list_rows(prompt_partition(TRAIN_PARTITION))
            self.rows = {uid: tag["row"] for uid, tag in zip(listed.keys, listed.tags, strict=True)}
        return await self.worker.handle(method, payload)


@pytest.fixture
def trained(model_path):
    """The policy after one step, its metrics, and the rows of the step: prompt, response, given."""
    actor = ActorConfig(optim=OptimConfig(lr=1e-3, grad_clip=1e9), ppo_mini_batch_size=4, use_kl_loss=False)
    graph, columns, plane = build_graph(ALGORITHM, actor), step_columns(ALGORITHM, actor), MemoryDataPlane()
    policy = TorchPolicyBackend(model_path, actor, rollout_n=N, seed=0)
    codec = Tokenizer(encode=lambda text: [LETTERS.index(letter) + 2 for letter in text], decode=decode)
    answers = Demonstrations(
        tokenizer=codec, eos_id=1, given=lambda source, n: ALGORITHM.given_responses(source, n, divergence=False)
    )
    rollout = RolloutWorker(plane, HFRolloutEngine(model_path), {"train": ROWS}, demonstrations=answers)
    settings = RewardSettings(algorithm=ALGORITHM, response_length=5, policy_loss=actor.policy_loss)
    reward = RewardWorker(plane, columns, InlineScorer(score), decode, settings)
    handle = Local("actor", ActorWorker(plane, columns, policy, 1.0), plane)
    buffers, steps = make_buffers(plane), []
    trainer = PPOTrainer(
        TrainerParts(
            graph=graph,
            plane=plane,
            buffers=buffers,
            workers=Workers(
                rollout=[Local("rollout", rollout, plane)], reward=Local("reward", reward, plane), actor=[handle]
            ),
            weight_sync=None,
            train_order=PromptOrder(4, 4, 0),
            sessions=lambda row: ALGORITHM.sessions(ROWS[row].data_source, N, divergence=False),
            validation_size=0,
            rollout=RolloutConfig(n=N, response_length=5, num_workers=1),
            actor=actor,
            critic=CriticConfig(),
            loop=LoopConfig(total_training_steps=1, val_before_train=False, test_freq=0, stage_timeout_s=60),
            on_step=lambda step, metrics: steps.append(dict(metrics)),
        )
    )

    async def main():
        async with opened(buffers), asyncio.timeout(60):
            await trainer.fit()
        assert not any((await plane.stats()).rows.values())

    asyncio.run(main())
    uids = [RowKey.parse(key).uid for key in handle.batch.keys]
    responses = [row.tolist() for row in handle.data.ragged("responses").rows()]
    return policy, steps[-1], [(handle.rows[uid], response) for uid, response in zip(uids, responses, strict=True)]


def log_prob(model, row, response):
    """Sum of the log-probs of a response."""
    prompt = list(ROWS[row].prompt_ids)
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None]).sum()


def test_loss_and_gradient_are_those_of_one_answer_beside_the_responses(trained, model_path):
    """The mean over all tokens: advantage * log-prob, at ratio 1, and log-prob of answers."""
    policy, metrics, rows = trained
    answers = [(row, response) for row, response in rows if ROWS[row].data_source == "answers"]
    assert sorted(answers) == [(1, [3, 4, 5, 1]), (3, [9, 1])]
    model = AutoModelForCausalLM.from_pretrained(model_path)
    total = sum(log_prob(model, *one) for one in answers)
    assert metrics["actor/ce_loss"] == pytest.approx(-total.item() / 6, rel=1e-5)
    for row in (0, 2):
        responses = [response for place, response in rows if place == row]
        assert len(responses) == N
        scores = [score("", decode(response), "") for response in responses]
        assert len(set(scores)) > 1
        for response, got in zip(responses, scores, strict=True):
            advantage = (got - fmean(scores)) / (stdev(scores) + 1e-6)
            total = total + advantage * log_prob(model, row, response)
    (-total / sum(len(response) for _, response in rows)).backward()
    ours = dict(policy._model.named_parameters())
    pairs = [(ours[name].grad, parameter.grad) for name, parameter in model.named_parameters()]
    error = sum(((a - b) ** 2).sum() for a, b in pairs) ** 0.5
    assert float(error) <= 1e-4 * float(sum((b**2).sum() for _, b in pairs) ** 0.5)


def test_answers_have_no_part_in_the_scores_of_responses(trained):
    _, metrics, rows = trained
    scores = [score("", decode(response), "") for row, response in rows if ROWS[row].data_source == "rewards"]
    assert metrics["critic/score/mean"] == pytest.approx(fmean(scores), rel=1e-6)
    assert metrics["source/answers/tokens"] == 0
