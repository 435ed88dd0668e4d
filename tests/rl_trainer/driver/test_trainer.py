"""The training loop with real torch workers and the in-memory data plane, in one process."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from unittest.mock import AsyncMock

import msgspec
import numpy as np
import pytest
from documented_metrics import assert_documented
from relative import apart
from replay_buffers import make_buffers, opened

from rl_protocol import (
    BatchData,
    DataLostError,
    KVBatchMeta,
    RewardError,
    RowKey,
    SchemaError,
    WorkerError,
    ragged,
)
from rl_protocol.ports import WeightSyncReport
from rl_protocol.rl_columns import prompt_partition
from rl_protocol.testing.bigram_model import BigramCritic
from rl_protocol.testing.memory_data_plane import MemoryDataPlane
from rl_trainer import (
    ActorConfig,
    ActorWorker,
    AlgorithmConfig,
    CriticConfig,
    CriticWorker,
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
    SessionKind,
    Tokenizer,
    TrainerParts,
    Trajectory,
    Workers,
    build_graph,
    needs_critic,
    needs_sum_pi_squared,
    step_columns,
)
from rl_trainer.algorithms.advantages import ADVANTAGE_ESTIMATORS
from rl_trainer.algorithms.losses import POLICY_LOSSES
from rl_trainer.algorithms.old_log_prob import LogProbGap, loss_correction
from rl_trainer.algorithms.staleness_policy import StalenessPolicy
from rl_trainer.backends.torch_critic import TorchCriticBackend
from rl_trainer.backends.torch_policy import PolicyOptions, TorchPolicyBackend
from rl_trainer.config import (
    AsyncConfig,
    FilterGroupsConfig,
    KLControlConfig,
    OverlongConfig,
    PolicyLossConfig,
    ReplayConfig,
    RolloutCorrectionConfig,
)
from rl_trainer.driver.batch_queue import BatchQueue
from rl_trainer.driver.hooks import Hook
from rl_trainer.graph.config_checks import check_combination
from rl_trainer.rewards import Failure, InlineScorer, Scored
from rl_trainer.rollout.agents import Call, Limits, ToolAgent, ToolKind
from rl_trainer.rollout.hf_engine import HFRolloutEngine
from rl_trainer.rollout.session_turns import SINGLE_TURN
from rl_trainer.workers.columns import BASELINE_PARTITION
from rl_trainer.workers.messages import FilterResult, RolloutCall, RolloutResult, StageCall, StageResult


class Digits:
    """Prompts "00".."19"; the right answer is the last digit."""

    def __len__(self):
        return 20

    def __getitem__(self, row):
        return PromptRow(
            prompt_ids=tuple(2 + int(c) for c in f"{row:02d}"), data_source="digits", ground_truth=str(row % 10)
        )


def decode(ids):
    return "".join("0123456789+="[i - 2] if i > 1 else "" for i in ids)


CODEC = Tokenizer(encode=lambda text: ["0123456789+=".index(letter) + 2 for letter in text], decode=decode)


def starts_right(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.startswith(ground_truth))


class LocalWorker:
    """A WorkerHandle in this process."""

    def __init__(self, name, worker):
        self.name, self.worker, self.bytes_moved, self.calls, self.payloads = name, worker, 0, [], []
        self.process = self

    async def call(self, method, payload, *, timeout_s):
        self.calls.append(method)
        self.payloads.append(payload)
        answer = await self.worker.handle(method, payload)
        self.bytes_moved += len(payload) + len(answer)
        return answer


class WatchedPlane(MemoryDataPlane):
    """Record the most rows of each partition and the columns that each get asks for."""

    def __init__(self):
        super().__init__()
        self.most, self.asked = {}, []

    async def put(self, partition, keys, data=None, **kwargs):
        done = await super().put(partition, keys, data, **kwargs)
        self.most[partition] = max(self.most.get(partition, 0), (await self.stats()).rows[partition])
        return done

    async def get(self, meta, fields=None, **kwargs):
        self.asked.append(tuple(fields or ()))
        return await super().get(meta, fields, **kwargs)


class DirectSync:
    """Weight sync that loads the policy's weights directly into engines, and lets them sleep."""

    def __init__(self, policy, engines):
        self.policy, self.engines, self.versions = policy, engines, []
        self.log = []

    async def sleep(self, *, weights_follow):
        self.log.append("sleep" if weights_follow else "release")
        freed = [await engine.sleep(2 if weights_follow else 1) for engine in self.engines]
        return sum(freed) if weights_follow else None

    async def wake(self, part):
        self.log.append(f"wake {part}")
        for engine in self.engines:
            await engine.wake(part)

    async def update_weights(self, version):
        self.log.append("update_weights")
        for engine in self.engines:
            engine.load_weights(list(self.policy.named_weights()), version)
        self.versions.append(version)
        return WeightSyncReport(version=version, num_bytes=1, seconds=0.0, receivers=("r",) * len(self.engines))


class Setup:
    def __init__(
        self,
        path,
        *,
        estimator="grpo",
        reward=starts_right,
        sync=True,
        steps=2,
        critic_warmup=0,
        engines=2,
        algorithm=None,
        actor=None,
        temperature=1.0,
        session=SINGLE_TURN,
        lora=None,
        validate=False,
        validation_size=20,
        response_length=3,
        plane=None,
        hooks=None,
        replay=None,
        async_rl=None,
        sleeps=False,
        sessions=None,
    ):
        algorithm = AlgorithmConfig(adv_estimator=estimator, **(algorithm or {}))
        defaults = {"optim": OptimConfig(lr=3e-3), "ppo_mini_batch_size": 4, "use_kl_loss": True}
        actor = ActorConfig(**(defaults | (actor or {})))
        check_combination(algorithm, actor, 4)
        critic = CriticConfig(optim=OptimConfig(lr=3e-3), ppo_mini_batch_size=4, warmup_steps=critic_warmup)
        rollout = RolloutConfig(n=4, response_length=response_length, num_workers=engines, temperature=temperature)
        graph, columns = build_graph(algorithm, actor), step_columns(algorithm, actor)
        self.plane = plane or WatchedPlane()
        self.policy = TorchPolicyBackend(
            path,
            actor,
            lora=lora,
            rollout_n=4,
            seed=0,
            options=PolicyOptions(
                correction=loss_correction(algorithm),
                sum_pi_squared=needs_sum_pi_squared(algorithm),
            ),
        )
        engines = [HFRolloutEngine(path) for _ in range(engines)]
        data = {"train": Digits(), "val": Digits()}
        critic_worker = (
            CriticWorker(self.plane, columns, TorchCriticBackend(path, critic, rollout_n=4, seed=0))
            if needs_critic(algorithm)
            else None
        )
        actor_worker = LocalWorker("actor", ActorWorker(self.plane, columns, self.policy, 1.0))
        reference = LocalWorker("ref", ReferenceWorker(self.plane, columns, TorchPolicyBackend(path, None), 1.0))
        self.workers = Workers(
            rollout=[
                LocalWorker(
                    f"rollout-{i}",
                    RolloutWorker(self.plane, e, data, session, CODEC, observations=algorithm.trains_observations),
                )
                for i, e in enumerate(engines)
            ],
            reward=LocalWorker(
                "reward",
                RewardWorker(
                    self.plane,
                    columns,
                    InlineScorer(reward),
                    decode,
                    RewardSettings(algorithm=algorithm, response_length=response_length, policy_loss=actor.policy_loss),
                ),
            ),
            actor=[actor_worker],
            ref=[actor_worker] if lora else [reference],
            critic=[LocalWorker("critic", critic_worker)] if critic_worker else [],
        )
        self.sync = DirectSync(self.policy, engines)
        self.steps = []
        self.buffers = make_buffers(self.plane, replay)
        self.trainer = PPOTrainer(
            TrainerParts(
                graph=graph,
                plane=self.plane,
                buffers=self.buffers,
                replay=replay or ReplayConfig(),
                workers=self.workers,
                weight_sync=self.sync if sync else None,
                rollout_memory=self.sync if sleeps else None,
                train_order=PromptOrder(20, 8, 0),
                validation_size=validation_size,
                rollout=rollout,
                actor=actor,
                filter_groups=algorithm.filter_groups,
                critic=critic,
                loop=LoopConfig(
                    total_training_steps=steps, test_freq=int(validate), val_before_train=validate, stage_timeout_s=60
                ),
                on_step=lambda step, metrics: self.steps.append((step, dict(metrics))),
                hooks=hooks or {},
                async_rl=async_rl or AsyncConfig(),
                sessions=sessions,
            )
        )

    def fit(self):
        async def main():
            async with opened(self.buffers):
                return await self.trainer.fit()

        return asyncio.run(main())


def test_a_step_goes_through_all_stages_and_leaves_the_plane_empty(model_path):
    setup = Setup(model_path, estimator="gae", validate=True)
    last = setup.fit()
    assert [step for step, _ in setup.steps] == [0, 1, 2]
    assert last == {k: v for k, v in setup.steps[-1][1].items() if k.startswith("val-")}
    assert set(last) == {"val-core/digits/acc/mean@1", "val-aux/digits/score/mean@1"}
    updates = ["read_ahead", "update_actor"]
    assert setup.workers.actor[0].calls == ["old_log_prob", *updates, "log_prob_gap", *updates]
    assert setup.workers.critic[0].calls == ["values", "read_ahead", "update_critic"] * 2
    assert setup.sync.versions == [1, 2]
    assert not any(asyncio.run(setup.plane.stats()).rows.values())
    assert all(type(v) is float for _, metrics in setup.steps for v in metrics.values())


def test_the_rows_of_a_step_are_removed_while_its_weights_are_sent(model_path):
    setup = Setup(model_path, steps=1)
    send = setup.sync.update_weights

    async def send_once_the_rows_are_gone(version):
        async with asyncio.timeout(60):
            while (await setup.plane.stats()).rows.get("train"):  # noqa: ASYNC110 - the plane has no such event
                await asyncio.sleep(0.001)
        return await send(version)

    setup.sync.update_weights = send_once_the_rows_are_gone
    setup.fit()
    assert setup.sync.versions == [1]
    assert setup.plane.most["train"] == 32


def test_without_validation_rows_nothing_is_validated(model_path):
    setup = Setup(model_path, validate=True, validation_size=0)
    assert setup.fit() == {}
    assert [step for step, _ in setup.steps] == [1, 2]
    assert not any(name.startswith("val-") or name == "timing_s/testing" for _, m in setup.steps for name in m)


def test_the_example_of_the_readme_trains(model_path, readme_code):
    setup = Setup(model_path, actor={"use_kl_loss": False})
    space = {"plane": setup.plane, "workers": setup.workers, "sync": setup.sync}
    exec(compile(readme_code("packages/rl-trainer", 0), "README.md", "exec"), space)
    assert setup.sync.versions == [1, 2]
    assert set(space["metrics"]) == {"val-core/digits/acc/mean@1", "val-aux/digits/score/mean@1"}


def parts_of_reward(*args):
    return {"score": starts_right(*args), "brevity": 1.0 / len(args[1] or "x")}


async def two_trajectories(row, generate):
    """Reset the context after one turn; the second trajectory starts with an observation token."""
    first = await generate(row.prompt_ids, 2)
    second = await generate([*row.prompt_ids, 13], 2)
    given = Trajectory(
        response_ids=(13, *second.response_ids),
        response_mask=(False, *(True for _ in second.response_ids)),
        log_probs=(0.0, *second.log_probs),
        weight_version=second.weight_version,
    )
    return [Trajectory.of(first), given]


COMBINATIONS = [
    ("gae", "vanilla", {}),
    ("grpo", "gspo", {}),
    ("dr_grpo", "gspo", {}),
    ("rloo", "cispo", {}),
    ("reinforce_plus_plus", "sapo", {}),
    ("reinforce_plus_plus_baseline", "gpg", {}),
    ("grpo_passk", "dppo_tv", {}),
    ("opo", "dppo_kl", {}),
    ("gpg", "clip_cov", {"policy_loss": {"clip_cov_lb": -9.0}}),
    ("remax", "kl_cov", {}),
    ("optimal_token_baseline", "vanilla", {}),
    ("maxrl", "dro", {}),
    ("lite_ppo", "vanilla", {}),
    ("raft", "gpg", {}),
    ("opd", "vanilla", {}),
    ("gigpo", "vanilla", {"algorithm": {"gamma": 0.9}}),
    ("rae", "vanilla", {"algorithm": {"rae_decay": 0.5}}),
    ("dr_grpo", "kimi_k15", {}),
    ("rloo", "topr", {}),
    ("grpo", "luspo", {}),
    ("grpo", "vespo", {}),
    ("gdpo", "geo_mean", {"algorithm": {"gdpo_reward_keys": ("score", "brevity"), "gdpo_reward_weights": (1.0, 0.5)}}),
]


def test_observations_of_an_agent_are_learned(model_path):
    """Token 13 of the environment begins the second trajectory of each session."""
    setup = Setup(model_path, session=SessionKind(two_trajectories), steps=4, algorithm={"echo_coef": 1.0})
    setup.fit()
    losses = [m["actor/ce_loss"] for _, m in setup.steps]
    assert losses[-1] < losses[0]
    assert losses[0] == pytest.approx(np.log(15), rel=0.2)  # of a random model with as many tokens


def test_every_name_takes_part():
    assert {estimator for estimator, *_ in COMBINATIONS} == set(ADVANTAGE_ESTIMATORS.names())
    assert {loss for _, loss, _ in COMBINATIONS} == set(POLICY_LOSSES.names())


@pytest.mark.parametrize(("estimator", "loss", "more"), COMBINATIONS)
def test_every_estimator_and_loss_trains_on_sessions_of_several_trajectories(model_path, estimator, loss, more):
    setup = Setup(
        model_path,
        estimator=estimator,
        reward=parts_of_reward,
        session=SessionKind(two_trajectories),
        steps=2,
        algorithm=more.get("algorithm"),
        actor={
            "policy_loss": PolicyLossConfig(loss_mode=loss, **more.get("policy_loss", {})),
            "loss_agg_mode": "seq-mean-token-mean",
        },
    )
    setup.fit()
    steps = [m for step, m in setup.steps if step]
    assert setup.plane.most["train"] == 8 * 4 * 2
    # observation tokens are in no statistic
    assert max(m["training/rollout_log_probs_diff_max"] for m in steps) < 1e-4
    assert all(m["actor/grad_norm"] > 0 for m in steps)
    assert all(np.isfinite(v) for m in steps for v in m.values())
    assert steps[0]["response_length/max"] <= 3
    assert ("critic/baseline/mean" in steps[-1]) == (estimator == "remax")
    assert not any(asyncio.run(setup.plane.stats()).rows.values())
    assert_documented(steps[-1])


class Reversed:
    """A tool that reverses text, called by every turn without a plus; fails for short texts."""

    name, description, arguments = "reversed", "", msgspec.defstruct("Text", [("text", str)])

    def call(self, arguments):
        if len(arguments.text) < 2:
            raise ValueError("too short")
        return arguments.text[::-1] + "="

    def calls(self, text):
        return [Call("reversed", {"text": text})] if "+" not in text else []

    def observation(self, answers):
        return "".join("==" if one.failed else one.text for one in answers)


def test_what_a_tool_said_is_seen_and_not_trained_on(model_path):
    agent = ToolAgent([ToolKind(Reversed)], Reversed(), Limits(turns=3, turn_tokens=5))
    setup = Setup(model_path, session=SessionKind(agent.run), validate=True, response_length=20)
    setup.fit()
    steps = [m for step, m in setup.steps if step]
    for metrics in steps:
        # The log-probs of engine and trainer agree at every position. Those of observations are 0
        # and would differ.
        assert metrics["training/rollout_log_probs_diff_max"] < 1e-4
        assert metrics["num_turns/max"] == 3
        assert metrics["num_turns/min"] == 1
        assert 0 < metrics["agent/tool_errors/mean"] < metrics["agent/tool_calls/mean"] <= 2
        assert sum(value for name, value in metrics.items() if name.startswith("agent/finish/")) == pytest.approx(1.0)
        assert metrics["actor/grad_norm"] > 0
        assert_documented(metrics)
    validated = setup.steps[0][1]
    assert 1 <= validated["val-aux/num_turns/mean"] <= 3
    assert validated["val-aux/agent/tool_calls/mean"] <= 2


def test_the_baseline_of_remax_is_the_score_of_the_greedy_answer(model_path):
    """With nearly greedy sampling every response is the greedy one, so all advantages are 0."""
    setup = Setup(model_path, estimator="remax", steps=1, temperature=1e-4)
    setup.fit()
    metrics = setup.steps[-1][1]
    assert metrics["critic/baseline/mean"] == metrics["critic/score/mean"]
    assert metrics["critic/advantages/max"] == metrics["critic/advantages/min"] == 0.0


def test_remax_generates_one_greedy_answer_where_prompts_have_their_own_number_of_responses(model_path):
    setup, greedy = Setup(model_path, estimator="remax", steps=1, sessions=lambda row: 2 + row % 2), []
    baseline = setup.workers.reward.worker.baseline

    async def watch(rows, call):
        greedy.extend((await setup.plane.list_rows(BASELINE_PARTITION)).keys)
        return await baseline(rows, call)

    setup.workers.reward.worker.baseline = watch
    setup.fit()
    assert len({RowKey.parse(key).uid for key in greedy}) == len(greedy) == 8


@pytest.mark.parametrize(
    ("old_log_prob", "settings"),
    [
        ("auto", {"rollout_is": "sequence", "rollout_rs": ("token_k1",), "rollout_rs_threshold": ("1.00001",)}),
        (
            "recompute",
            {"rollout_is": "token", "rollout_is_threshold": "0.5_2", "rollout_is_batch_normalize": True},
        ),
        ("rollout", {"rollout_rs": ("seq_mean_k3",), "rollout_rs_threshold": ("0.01",)}),
    ],
)
def test_the_rollout_correction_runs_in_and_outside_of_the_loss(model_path, old_log_prob, settings):
    """The engines keep the first weights, so the policies differ more with every step."""
    correction = RolloutCorrectionConfig(**settings)
    setup = Setup(
        model_path,
        estimator="gae",
        steps=3,
        sync=False,
        algorithm={"rollout_correction": correction, "old_log_prob": old_log_prob},
    )
    setup.fit()
    metrics = setup.steps[-1][1]
    assert metrics["rollout_corr/kl"] != 0
    assert ("old_log_prob" in setup.workers.actor[0].calls) == (old_log_prob != "rollout")
    assert "log_prob_gap" not in setup.workers.actor[0].calls
    assert metrics["old_log_prob/recomputed"] == float(old_log_prob != "rollout")
    if correction.rollout_rs:
        assert 0 <= metrics["rollout_corr/rollout_rs_masked_fraction"] <= 1
    if correction.rollout_is:
        assert metrics["rollout_corr/rollout_is_mean"] > 0


def test_auto_takes_the_log_probs_of_the_engine_where_they_agree(model_path):
    """The first step compares all rows, the others a sample of them, with about the same result."""
    recomputed, auto = (Setup(model_path, steps=3, algorithm={"old_log_prob": name}) for name in ("recompute", "auto"))
    recomputed.fit()
    auto.fit()
    assert [m["old_log_prob/recomputed"] for _, m in recomputed.steps] == [1.0, 1.0, 1.0]
    assert [m["old_log_prob/recomputed"] for _, m in auto.steps] == [1.0, 0.0, 0.0]
    assert auto.workers.actor[0].calls.count("log_prob_gap") == 2
    for (_, one), (_, other) in zip(recomputed.steps, auto.steps, strict=True):
        for name in ("actor/grad_norm", "actor/ref_kl", "critic/score/mean"):
            assert other[name] == pytest.approx(one[name], rel=1e-2)
        assert other["actor/entropy"] == pytest.approx(one["actor/entropy"], rel=0.1)
        assert other["training/rollout_log_probs_diff_mean"] < 1e-5
        assert_documented(other)
    asked = [fields for fields in auto.plane.asked if "old_log_probs" in fields]
    assert len(asked) == 2  # adv and update_actor of the first step


def test_auto_recomputes_what_old_weights_generated(model_path):
    setup = Setup(model_path, steps=3, sync=False)
    setup.fit()
    assert [m["old_log_prob/recomputed"] for _, m in setup.steps] == [1.0, 1.0, 1.0]
    assert "log_prob_gap" not in setup.workers.actor[0].calls[3:]


def test_auto_recomputes_where_a_sample_disagrees(model_path, monkeypatch):
    """The engine of the second step reports other log-probs, and that of the third does not."""
    setup = Setup(model_path, steps=4)
    compare = ActorWorker.log_prob_gap
    seen = []

    async def differs(worker, rows, call):
        seen.append((call.step, len(rows)))
        found = await compare(worker, rows, call)
        return LogProbGap(tokens=1, log_prob_sum=0.1) if call.step == 2 else found

    monkeypatch.setattr(ActorWorker, "log_prob_gap", differs)
    setup.fit()
    assert [m["old_log_prob/recomputed"] for _, m in setup.steps] == [1.0, 1.0, 0.0, 0.0]
    assert seen == [(2, 1), (3, 1), (4, 1)]
    assert setup.steps[1][1]["training/rollout_log_probs_diff_mean"] < 1e-5  # of all rows


def test_log_probs_are_compared_while_the_responses_are_scored(model_path, monkeypatch):
    """The score of a response waits here for the comparison to begin."""
    setup = Setup(model_path, steps=3)
    compare, reward, begun = ActorWorker.log_prob_gap, RewardWorker.reward, {2: asyncio.Event(), 3: asyncio.Event()}

    async def begins(worker, rows, call):
        begun[call.step].set()
        return await compare(worker, rows, call)

    async def waits(worker, rows, call):
        if call.step in begun:
            await asyncio.wait_for(begun[call.step].wait(), 60)
        return await reward(worker, rows, call)

    monkeypatch.setattr(ActorWorker, "log_prob_gap", begins)
    monkeypatch.setattr(RewardWorker, "reward", waits)
    setup.fit()
    assert [m["old_log_prob/recomputed"] for _, m in setup.steps] == [1.0, 0.0, 0.0]


def test_with_synchronised_weights_the_log_probs_of_the_engine_take_the_same_first_step(model_path):
    """Trainer and engine have the same weights, so old log-probs make no difference."""
    decoupled, bypass = (
        Setup(model_path, steps=1, algorithm={"old_log_prob": choice}, reward=lambda _, text, *more: float(len(text)))
        for choice in ("recompute", "rollout")
    )
    decoupled.fit()
    bypass.fit()
    found, want = bypass.steps[-1][1], decoupled.steps[-1][1]
    assert found["critic/advantages/max"] == want["critic/advantages/max"] > 0
    for name in ("actor/pg_loss", "actor/grad_norm"):
        assert apart(found[name], want[name], max(want["critic/advantages/max"], want[name])) < 1e-4


def test_the_adaptive_coefficient_moves_from_step_to_step(model_path):
    control = KLControlConfig(type="adaptive", kl_coef=0.5, target_kl=1e-9, horizon=64)
    setup = Setup(model_path, steps=3, algorithm={"use_kl_in_reward": True, "kl_penalty": "k3", "kl_ctrl": control})
    setup.fit()
    coefs = [m["actor/reward_kl_penalty_coeff"] for step, m in setup.steps if step]
    # The policy starts equal to its reference and then moves away. With 32 responses per step and a
    # horizon of 64, the coefficient changes by 20 % / 2.
    assert coefs == pytest.approx([0.5, 0.5 * 0.9, 0.5 * 0.9 * 1.1])


def test_a_part_of_the_reward_that_is_missing_is_named(model_path):
    setup = Setup(
        model_path, estimator="gdpo", reward=parts_of_reward, algorithm={"gdpo_reward_keys": ("score", "politeness")}
    )
    with pytest.raises(
        RewardError, match=r"all 32 samples.* sample 's1-0/0/0' of 'digits' it returned None as 'politeness'"
    ):
        setup.fit()


def test_no_answer_to_the_driver_has_room_for_a_column():
    """The driver receives only metadata: named floats, counts and names of prompts."""
    kinds = {
        kind: {f.name: f.type for f in msgspec.structs.fields(kind)}
        for kind in (StageResult, RolloutResult, FilterResult)
    }
    assert kinds == {
        StageResult: {"metrics": dict[str, float]},
        RolloutResult: {"tokens": int, "single": bool},
        FilterResult: {"uids": tuple[str, ...]},
    }


def test_what_belongs_to_a_prompt_is_stored_once(model_path):
    setup = Setup(model_path, steps=1)
    setup.fit()
    assert (setup.plane.most["train"], setup.plane.most["train/prompts"]) == (8 * 4, 8)


def test_only_declared_columns_travel(model_path):
    setup = Setup(model_path, steps=1)
    setup.fit()
    # the columns of a trajectory that old_log_prob and ref read
    assert ("responses",) in setup.plane.asked
    assert ("responses", "response_mask", "old_log_probs", "advantages", "ref_log_prob") in setup.plane.asked
    assert not any("ground_truth" in fields and "prompts" in fields for fields in setup.plane.asked)


def test_rollout_and_trainer_agree_while_synchronised_and_the_lag_grows_otherwise(model_path):
    together, separate = Setup(model_path, steps=3), Setup(model_path, steps=3, sync=False)
    together.fit()
    separate.fit()
    metrics = [m for step, m in together.steps if step]
    assert [m["training/off_policy/trajectory_staleness_worst/max"] for m in metrics] == [0, 0, 0]
    assert max(m["training/rollout_log_probs_diff_max"] for m in metrics) < 1e-4
    metrics = [m for step, m in separate.steps if step]
    assert [m["training/off_policy/trajectory_staleness_worst/max"] for m in metrics] == [0, 1, 2]
    assert metrics[2]["training/rollout_log_probs_diff_max"] > 1e-3


def test_the_result_does_not_depend_on_the_number_of_rollout_workers(model_path):
    one, three = Setup(model_path, engines=1), Setup(model_path, engines=3)
    one.fit()
    three.fit()
    for (_, a), (_, b) in zip(one.steps, three.steps, strict=True):
        for name in ("critic/score/mean", "actor/pg_loss", "actor/grad_norm", "val-core/digits/acc/mean@1"):
            if name in a:
                assert apart(a[name], b[name], max(abs(b[name]), b.get("critic/advantages/max", 0.0))) < 1e-4, name


@pytest.mark.parametrize("engines", [1, 3])
def test_throughput_is_tokens_over_seconds_for_any_engine(model_path, engines):
    """Unlike in verl, a separate rollout pool does not inflate the throughput.

    verl divides by the number of the trainer's GPUs alone.
    """
    setup = Setup(model_path, engines=engines, steps=1)
    setup.fit()
    (metrics,) = [m for step, m in setup.steps if step]
    assert metrics["perf/throughput"] == metrics["perf/total_num_tokens"] / metrics["timing_s/step"]
    rows = setup.plane.most["train"]
    assert metrics["perf/total_num_tokens"] == pytest.approx(
        rows * (metrics["prompt_length/mean"] + metrics["response_length/mean"])
    )


def test_a_step_is_one_batch_however_many_optimizer_steps_and_rounds_it_takes(model_path):
    setup = Setup(
        model_path,
        steps=3,
        actor={"ppo_epochs": 2, "ppo_mini_batch_size": 2, "optim": OptimConfig(lr=3e-3, lr_warmup_steps=24)},
        algorithm={"filter_groups": FilterGroupsConfig(enable=True, metric="score", max_num_gen_batches=2)},
        reward=lambda source, text, truth, extra=None: float(len(text)),
    )
    setup.fit()
    steps = [(step, m) for step, m in setup.steps if step]
    assert [step for step, _ in steps] == [m["training/global_step"] for _, m in steps] == [1, 2, 3]
    assert setup.sync.versions == [m["weight_sync/version"] for _, m in steps] == [1, 2, 3]
    # At most 2 epochs of 4 mini-batches: the learning rate schedule counts these, the step does
    # not.
    assert 0 < steps[0][1]["actor/lr"] <= 8 / 24 * 3e-3


def test_prompts_are_dealt_evenly_in_every_step_and_round(model_path):
    """Prompts are dealt by number, without counts of work in flight that could leak."""
    filtering = {"filter_groups": FilterGroupsConfig(enable=True, metric="score", max_num_gen_batches=3)}
    setup = Setup(model_path, engines=3, steps=2, algorithm=filtering)
    setup.fit()
    dealt = {}
    for worker in setup.workers.rollout:
        for payload in worker.payloads:
            asked = msgspec.msgpack.decode(payload, type=RolloutCall)
            if asked.partition.split == "train":
                dealt.setdefault(asked.prompts[0].lease.uid.partition("-")[0], {}).setdefault(worker.name, []).append(
                    len(asked.prompts)
                )
    assert dealt.keys() == {"s1", "s2"}
    for by_worker in dealt.values():
        shares = [sum(share) for share in by_worker.values()]
        assert len(shares) == 3
        assert max(shares) - min(shares) <= 3  # at most one in each of three rounds


def test_while_the_critic_warms_up_the_actor_stays_and_nothing_is_sent(model_path):
    setup = Setup(model_path, estimator="gae", steps=3, critic_warmup=2)
    setup.fit()
    assert setup.workers.actor[0].calls == [
        *("old_log_prob", "log_prob_gap", "log_prob_gap"),
        *("read_ahead", "update_actor"),
    ]
    assert setup.sync.versions == [1]


def test_replicas_sleep_during_updates_and_wake_for_the_weights_and_the_next_rollout(model_path):
    """The critic alone is updated first; then the weights of the rollout are dropped and sent."""
    setup = Setup(model_path, estimator="gae", steps=3, critic_warmup=1, sleeps=True, validate=True)
    actor = setup.workers.actor[0]
    call, held = actor.call, []

    async def watched(method, payload, *, timeout_s):
        if method == "update_actor":
            held.extend(sum(p.nbytes for p in engine._model.parameters()) for engine in setup.sync.engines)
        return await call(method, payload, timeout_s=timeout_s)

    actor.call = watched
    setup.fit()
    asleep = ["sleep", "wake weights", "update_weights", "wake kv_cache"]
    assert setup.sync.log == ["release", "wake kv_cache", *asleep, *asleep]
    assert held == [0] * 4, "two engines in two updates"
    weights = sum(p.nbytes for engine in setup.sync.engines for p in engine._model.parameters())
    freed = [metrics.get("perf/sleep_freed_bytes") for step, metrics in setup.steps if step]
    assert freed == [None, weights, weights]
    assert all(metrics["timing_s/sleep"] > 0 < metrics["timing_s/wake"] for step, metrics in setup.steps if step)
    for engine in setup.sync.engines:
        for name, weight in setup.policy._model.state_dict().items():
            assert weight.equal(engine._model.state_dict()[name]), name


@pytest.mark.parametrize("returned", [float("nan"), float("inf"), None, "1"])
def test_a_reward_that_fails_on_every_sample_ends_the_run(model_path, returned):
    setup = Setup(model_path, reward=lambda *_: returned)
    with pytest.raises(
        RewardError, match=rf"all \d+ samples.* For sample 's1-0/0/0' of 'digits' it returned {returned!r}"
    ):
        setup.fit()


@pytest.mark.parametrize("estimator", ["grpo", "gae", "remax"])
def test_samples_on_which_the_reward_fails_are_named_and_not_trained_on(model_path, estimator, caplog):
    """The reward fails for some answers; the others are trained on, and no failure counts as 0."""

    def reward(source, text, truth, extra=None):
        if truth in "01" and (estimator == "remax" or len(text) % 2):
            raise ValueError(f"no answer to {truth}")
        return 0.5

    setup = Setup(model_path, estimator=estimator, reward=reward, steps=2, validate=True)
    seen, tags, kept = [], [], setup.workers.reward.worker.adv

    async def watch(rows, call):
        known = await setup.plane.list_rows("train")
        tags.append({key for key, tag in zip(known.keys, known.tags, strict=True) if "reward_failure" in tag})
        seen.append(set(call.batch.keys))
        return await kept(rows, call)

    setup.workers.reward.worker.adv = watch
    setup.fit()
    metrics = [m for step, m in setup.steps if step]
    for m, trained, failed in zip(metrics, seen, tags, strict=True):
        assert m["reward/failures"] == m.get("reward/failures/exception", 0.0) == len(failed)
        assert not trained & failed
        assert len(trained) == 8 * 4 - len(failed)
        assert m["critic/score/mean"] == m["critic/score/min"] == 0.5
        assert all(np.isfinite(value) for value in m.values())
    assert sum(map(len, tags)) > 0
    for key in set.union(*tags):
        assert (
            f"reward failed (exception) for sample {key!r} of 'digits': it raised ValueError: no answer to"
            in caplog.text
        )
    validation = setup.steps[0][1]
    assert 0 < validation["val-aux/digits/reward_failures"] < 20
    assert validation["val-core/digits/acc/mean@1"] == pytest.approx(
        0.5 * (20 - validation["val-aux/digits/reward_failures"]) / 20
    )


def test_a_round_in_which_every_reward_fails_teaches_nothing(model_path):
    """There are too few samples to conclude that a function is broken which has worked before."""
    filtering = {"filter_groups": FilterGroupsConfig(enable=True, max_num_gen_batches=2)}
    setup = Setup(model_path, steps=1, algorithm=filtering, engines=1)
    worker = setup.workers.reward.worker
    worker._responses._works = True
    score = worker._responses._scorer.score

    async def fail(samples):
        outcomes = await score(samples)
        return [Failure(kind="died", message="x")] * len(samples) if len(samples) != 20 else outcomes

    worker._responses._scorer.score = fail
    setup.trainer._sampler._policy = StalenessPolicy(batch_size=2)
    setup.fit()
    metrics = setup.steps[-1][1]
    assert metrics["reward/failures"] == metrics["reward/failures/died"] == 2 * 2 * 4
    assert metrics["training/filter_groups/prompts_kept"] == 0
    assert setup.sync.versions == []
    assert not any(asyncio.run(setup.plane.stats()).rows.values())


def test_where_the_greedy_answer_has_no_score_the_mean_of_the_others_is_the_baseline(model_path):
    setup = Setup(model_path, estimator="remax", steps=1, engines=1)
    score, values = setup.workers.reward.worker._responses._scorer.score, iter(range(10_000))

    async def fail_on_some_baselines(samples):
        outcomes = await score(samples)
        # the greedy answers are scored separately, one for each of eight prompts
        if len(samples) != 8:
            return [Scored(numbers={"score": float(v), "acc": 0.0}) for _, v in zip(samples, values, strict=False)]
        return [Failure(kind="died", message="x") if i % 2 else one for i, one in enumerate(outcomes)]

    setup.workers.reward.worker._responses._scorer.score = fail_on_some_baselines
    adv, found = setup.workers.reward.worker.adv, {}

    async def watch(rows, call):
        data = await setup.plane.get(call.batch, ["scores", "reward_baselines"])
        columns = (data.dense(name).values.tolist() for name in ("scores", "reward_baselines"))
        for key, one, baseline in zip(call.batch.keys, *columns, strict=True):
            found.setdefault(key.partition("/")[0], []).append((one, baseline))
        return await adv(rows, call)

    setup.workers.reward.worker.adv = watch
    setup.fit()
    means = {uid: (np.mean([s for s, _ in rows]), {b for _, b in rows}) for uid, rows in found.items()}
    assert sum(baseline == {mean} for mean, baseline in means.values()) == 4
    assert all(len(baseline) == 1 for _, baseline in means.values())


def test_a_failure_keeps_the_rows_for_inspection_and_cancels_the_others(model_path):
    setup = Setup(model_path, steps=1)

    async def fail(method, payload, *, timeout_s):
        raise WorkerError("the reference is gone")

    setup.workers.ref[0].call = fail
    with pytest.raises(WorkerError, match="the reference is gone"):
        setup.fit()
    assert asyncio.run(setup.plane.stats()).rows["train"] == 32


class LosingPlane(WatchedPlane):
    """Lose the rows of one partition from get number `at` on, until they are cleared.

    No get may happen during an update: the last get of a step comes before it.
    """

    def __init__(self, at):
        super().__init__()
        self.at, self.count, self.lost, self.updating = at, 0, None, False

    async def get(self, meta, fields=None, **kwargs):
        assert not self.updating, "an update needs no rows any more"
        self.count += 1
        if self.count == self.at:
            self.lost = meta.partition
        if meta.partition == self.lost:
            raise DataLostError(f"rows of {meta.partition} were lost")
        return await super().get(meta, fields, **kwargs)

    async def clear(self, partition, keys=None, **kwargs):
        self.lost = None if partition == self.lost else self.lost
        return await super().clear(partition, keys, **kwargs)


def losing(model_path, at, **kwargs):
    """Run one step on a LosingPlane; return the setup, the metrics and the final state.

    The metrics exclude times. The final state is the policy's weights and the KL coefficient.
    """
    kl = {
        "kl_ctrl": KLControlConfig(type="adaptive", kl_coef=0.1, target_kl=1e-6, horizon=100),
        "use_kl_in_reward": True,
    }
    setup = Setup(model_path, plane=LosingPlane(at), algorithm=kl, **kwargs)
    for worker in (*setup.workers.actor, *setup.workers.critic):
        call = worker.call

        async def watched(method, payload, call=call, **kw):
            setup.plane.updating |= method.startswith("update")
            try:
                return await call(method, payload, **kw)
            finally:
                setup.plane.updating = False

        worker.call = watched
    setup.fit()
    numbers = [
        {k: v for k, v in metrics.items() if not k.startswith(("timing", "perf", "idle"))} for _, metrics in setup.steps
    ]
    weights = {weight.name: weight.data.tobytes() for weight in setup.policy.named_weights()}
    return setup, numbers, (weights, setup.workers.reward.worker._advantages.kl_coef)


def test_whichever_rows_are_lost_the_run_ends_as_it_would_have(model_path):
    """Lose rows at each get of a step and its validation in turn; a hook is notified."""
    told = []

    class Listening(Hook):
        def on_data_lost(self, step, attempt, attempts):
            told.append((step, attempt, attempts))

    whole, numbers, end = losing(model_path, 0, estimator="gae", steps=1)
    assert whole.plane.count > 10
    for at in range(1, whole.plane.count + 1):
        told.clear()
        setup, again, after = losing(model_path, at, estimator="gae", steps=1, hooks={"listening": Listening()})
        assert again == numbers, at
        assert after == end, at
        assert told == [(1, 2, 4)]
        assert not any(asyncio.run(setup.plane.stats()).rows.values())


def test_rows_that_are_lost_again_and_again_end_the_run(model_path):
    setup = Setup(model_path, steps=1)
    setup.plane.get = gone = AsyncMock(side_effect=DataLostError("rows were lost"))
    with pytest.raises(DataLostError, match="rows were lost"):
        setup.fit()
    assert gone.await_count == 2 * 4, "ahead of the stage and in it, in each attempt"
    assert [len(worker.calls) for worker in setup.workers.rollout] == [4, 4]


def test_a_worker_refuses_what_it_does_not_know(model_path):
    worker = Setup(model_path).workers.actor[0].worker
    call = msgspec.msgpack.encode(StageCall(step=1, batch=KVBatchMeta(partition="p", keys=())))
    for method, payload, message in (
        (
            "launch",
            call,
            "ActorWorker has no handler 'launch'; it has log_prob_gap, old_log_prob, ref, update_actor, save, read_ahead, state_digest, "
            "save_state, finish_save, load_state",
        ),
        ("old_log_prob", b"\xff", "not a StageCall"),
        ("old_log_prob", b"\x81\xa4\xff\xff\xff\xff\x01", "not a StageCall"),
        ("old_log_prob", msgspec.msgpack.encode({"step": 1, "surprise": 2}), "not a StageCall"),
    ):
        with pytest.raises(WorkerError, match=message):
            asyncio.run(worker.handle(method, payload))


class OneValueTooFew(BigramCritic):
    def compute_values(self, batch):
        rows = super().compute_values(batch).ragged("values").rows()
        return BatchData({"values": ragged([*rows[:-1], rows[-1][:-1]], "float32")})


def test_a_column_that_does_not_align_with_what_was_read_is_refused_by_name():
    async def body():
        plane = MemoryDataPlane()
        await plane.put(prompt_partition("train"), ["p"], BatchData({"prompts": ragged([[2, 3]], "int64")}))
        rows = BatchData({"responses": ragged([[4, 1], [5, 1]], "int64")})
        batch = await plane.put("train", ["p/0/0", "p/1/0"], rows)
        worker = CriticWorker(
            plane, step_columns(AlgorithmConfig(adv_estimator="gae"), ActorConfig()), OneValueTooFew()
        )
        with pytest.raises(
            SchemaError, match=r"Row 1 \('p/1/0'\), column 'values': expected length len\(responses\) = 2, got 1"
        ):
            await worker.run("values", StageCall(step=1, batch=batch))
        assert (await plane.list_rows("train")).fields == ("responses",)

    asyncio.run(body())


class FailsFirst:
    """A kind of session that fails for its first `count` sessions of each prompt in `rows`."""

    def __init__(self, rows, count):
        self.left = {tuple(2 + int(c) for c in f"{row:02d}"): count for row in rows}

    async def run(self, row, generate):
        if self.left.get(row.prompt_ids, 0):
            self.left[row.prompt_ids] -= 1
            raise ConnectionError("the tool is gone")
        return [Trajectory.of(await generate(row.prompt_ids))]


@pytest.mark.parametrize(
    ("policy", "count", "trained", "metric"),
    [
        ("refill", 1, 32, "replay/retried_prompts"),
        ("refill", 8, 32, "replay/replaced_prompts"),
        ("accept_partial", 3, 32 - 3, "replay/partial_prompts"),
    ],
)
@pytest.mark.parametrize("estimator", ["grpo", "remax"])
def test_a_step_survives_failed_rollouts(model_path, estimator, policy, count, trained, metric):
    """The sessions of one prompt of the first step fail."""
    (row,) = PromptOrder(20, 8, 0).take(3, 1)
    told, seen = [], []

    class Listening(Hook):
        def on_rollout_failure(self, step, failures, replaced):
            told.append((step, sum(one.sessions for one in failures), replaced))

    setup = Setup(
        model_path,
        estimator=estimator,
        session=SessionKind(FailsFirst([row], count).run),
        replay=ReplayConfig(on_failure=policy, max_attempts=2),
        hooks={"listening": Listening()},
    )
    adv = setup.workers.reward.worker.adv

    async def watch(batch, message):
        seen.append(message.batch.keys)
        return await adv(batch, message)

    setup.workers.reward.worker.adv = watch
    setup.fit()
    first, second = (m for step, m in setup.steps if step)
    assert len(seen[0]) == trained
    assert len(seen[1]) == 32
    assert first[metric] == 1
    assert first["replay/failed_sessions"] == count
    assert not any(value for name, value in second.items() if name.startswith("replay/"))
    assert told == [(1, count, int(first["replay/replaced_prompts"]))]
    assert setup.trainer._sampler.draws.position == 16 + first["replay/replaced_prompts"]
    assert_documented(first)
    assert not any(asyncio.run(setup.plane.stats()).rows.values())


def test_dynamic_filtering_trains_on_prompts_that_teach_alone(model_path):
    """Prompts whose four answers score alike are replaced, in at most three rounds."""
    seen = []

    def reward(source, text, truth, extra=None):
        return float(text.startswith(truth))

    filtering = {"filter_groups": FilterGroupsConfig(enable=True, metric="score", max_num_gen_batches=3)}
    setup = Setup(model_path, steps=2, algorithm=filtering, reward=reward)
    adv = setup.workers.reward.worker.adv

    async def watch(rows, call):
        scores = (await setup.plane.get(call.batch, ["scores"])).dense("scores").values
        seen.append((call.batch.keys, scores))
        return await adv(rows, call)

    setup.workers.reward.worker.adv = watch
    setup.fit()
    metrics = [m for step, m in setup.steps if step]
    assert len(seen) == 2
    for (keys, scores), m in zip(seen, metrics, strict=True):
        groups = {}
        for key, score in zip(keys, scores, strict=True):
            groups.setdefault(key.partition("/")[0], []).append(score)
        assert all(len(group) == 4 and min(group) < max(group) for group in groups.values())
        assert len(groups) == m["training/filter_groups/prompts_kept"] <= 8
        assert m["training/filter_groups/prompts_generated"] > 8
        assert 1 < m["training/filter_groups/rounds"] <= 3
    assert not any(asyncio.run(setup.plane.stats()).rows.values())


def test_metrics_of_rewards_are_those_of_all_rounds(model_path):
    """The first eight prompts have four sessions each whose reward says `first`."""
    calls = []

    def reward(source, text, truth, extra=None):
        calls.append(text)
        return {"score": float(text.startswith(truth)), "first": float(len(calls) <= 32)}

    filtering = {"filter_groups": FilterGroupsConfig(enable=True, metric="score", max_num_gen_batches=3)}
    setup = Setup(model_path, steps=1, algorithm=filtering, reward=reward)
    setup.fit()
    metrics = setup.steps[-1][1]
    generated = metrics["training/filter_groups/prompts_generated"]
    assert generated > 8
    assert metrics["reward/extra/first"] == pytest.approx(8 / generated)


def test_a_step_in_which_nothing_teaches_changes_nothing(model_path):
    filtering = {"filter_groups": FilterGroupsConfig(enable=True, max_num_gen_batches=2)}
    setup = Setup(model_path, steps=1, algorithm=filtering, reward=lambda *_: 1.0, sleeps=True)
    setup.fit()
    metrics = setup.steps[-1][1]
    assert metrics["training/filter_groups/prompts_kept"] == 0
    assert metrics["training/filter_groups/prompts_generated"] == 16
    assert setup.workers.actor[0].calls == []
    assert setup.sync.log == []
    assert not any(asyncio.run(setup.plane.stats()).rows.values())


def test_with_lora_the_actor_is_the_reference(model_path):
    setup = Setup(model_path, steps=3, lora=LoraConfig(rank=4))
    setup.fit()
    metrics = [m for step, m in setup.steps if step]
    assert setup.workers.actor[0].calls == [
        name
        for first in ("old_log_prob", "log_prob_gap", "log_prob_gap")
        for name in (first, "ref", "read_ahead", "update_actor")
    ]
    assert apart(metrics[0]["actor/ref_kl"], 0.0, metrics[0]["actor/entropy"]) < 1e-6
    assert apart(metrics[-1]["actor/ref_kl"], 0.0, metrics[0]["actor/entropy"]) > 1e-5
    # the engines have the merged weights
    assert max(m["training/rollout_log_probs_diff_max"] for m in metrics) < 1e-4


def numbers_of(setup):
    return [
        {k: v for k, v in metrics.items() if not k.startswith(("timing", "perf", "idle"))} for _, metrics in setup.steps
    ]


def test_without_staleness_the_pumps_do_what_one_loop_does(model_path):
    """The loop samples a step, then trains it: bit-equal weights, and the same metrics."""
    pumps, loop = (Setup(model_path, estimator="gae", steps=3, validation_size=0) for _ in range(2))
    pumps.fit()

    async def main():
        trainer = loop.trainer
        trainer._batches = queue = BatchQueue(1, 3, 60)
        async with opened(loop.buffers):
            for step in (1, 2, 3):
                await queue.admit(step)
                await queue.begin()
                await queue.finish(step, await trainer._sampler.sample(step))
                loop.steps.append((step, await trainer._step(step)))

    asyncio.run(main())
    assert numbers_of(pumps) == numbers_of(loop)
    one, other = (
        {weight.name: weight.data.tobytes() for weight in setup.policy.named_weights()} for setup in (pumps, loop)
    )
    assert one == other


def test_one_step_off_trains_on_what_the_weights_before_generated(model_path):
    setup = Setup(model_path, steps=4, async_rl=AsyncConfig(max_staleness=1))
    setup.fit()
    steps = [metrics for _, metrics in setup.steps]
    assert [m["training/off_policy/trajectory_staleness/mean"] for m in steps] == [0, 1, 1, 1]
    assert steps[0]["training/rollout_log_probs_diff_max"] < 1e-4 < steps[1]["training/rollout_log_probs_diff_max"]
    assert setup.sync.versions == [1, 2, 3, 4]
    assert_documented(steps[-1])
    assert not any(asyncio.run(setup.plane.stats()).rows.values())


def test_a_step_with_fewer_rows_than_ranks_is_skipped(model_path, caplog):
    """Where one prompt alone is informative, its 4 rows can't give each of 5 ranks one."""
    calls = itertools.count()

    def reward(source, text, truth, extra=None):
        return float(next(calls) == 0)

    filtering = {"filter_groups": FilterGroupsConfig(enable=True, metric="score", max_num_gen_batches=1)}
    setup = Setup(model_path, steps=1, algorithm=filtering, engines=1, reward=reward)
    ranks = setup.workers.actor * 5
    setup.trainer._parts = dataclasses.replace(
        setup.trainer._parts, workers=dataclasses.replace(setup.workers, actor=ranks, dp_ranks=range(5))
    )
    setup.fit()
    metrics = setup.steps[-1][1]
    assert metrics["training/filter_groups/prompts_kept"] == 1
    assert "step 1 has 4 rows for 5 ranks, and trains no row" in caplog.text
    assert setup.sync.versions == []
    assert not any(asyncio.run(setup.plane.stats()).rows.values())


def test_the_overlong_penalty_is_in_the_score_that_gdpo_looks_at(model_path):
    """Of responses with equal scores the longer ones get the lower advantages."""
    seen = []
    setup = Setup(model_path, estimator="gdpo", steps=1, engines=1, algorithm={"gdpo_reward_keys": ("score", "acc")})
    worker = setup.workers.reward.worker
    overlong = OverlongConfig(buffer_len=2, penalty_factor=1.0)
    worker._settings = dataclasses.replace(worker._settings, overlong=overlong)
    put = setup.plane.put

    async def watched(partition, keys, data=None, **more):
        if data is not None and "reward_components" in data:
            seen.append((data["reward_components"], data["scores"], data["acc"]))
        return await put(partition, keys, data, **more)

    setup.plane.put = watched
    setup.fit()
    (parts, scores, acc), *_ = seen
    assert (parts.values[0::2] == scores.values).all()
    assert (parts.values[1::2] == acc.values).all()
    assert (scores.values < acc.values).any()
