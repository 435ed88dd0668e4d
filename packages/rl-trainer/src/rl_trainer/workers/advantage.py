"""Turns scores into advantages, for the reward worker."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rl_protocol import BatchData, RowKey, dense
from rl_protocol.bridge import Output, declaration, tqbridge
from rl_protocol.ports import DataPlane
from rl_trainer.algorithms.advantage_pipeline import AdvantageSettings, estimate_advantages
from rl_trainer.algorithms.dapo import informative_prompts
from rl_trainer.algorithms.kl import adaptive_kl_coef
from rl_trainer.algorithms.metrics import stats
from rl_trainer.workers.base import with_prompts
from rl_trainer.workers.columns import BASELINE_PARTITION, TRAINER_SCHEMA, StepColumns
from rl_trainer.workers.messages import FilterResult, StageCall, StageResult
from rl_trainer.workers.scoring import RewardSettings
from rl_trainer.workers.trajectory_record import TrajectoryRecord

FAILURE_TAG = "reward_failure"
"""Tag of trajectories without a score: the kind of failure."""


class AdvantageStages:
    """The stages `filter`, `baseline` and `adv`, and what `adv` adapts from step to step.

    Attributes:
        kl_coef: weight of the divergence in the reward of the next step.
        role_means: running mean of the scores of each role.

    Args:
        record: records trajectories with their advantages; None: none.
    """

    def __init__(
        self,
        plane: DataPlane,
        columns: StepColumns,
        settings: RewardSettings,
        record: TrajectoryRecord | None = None,
    ) -> None:
        self.plane = with_prompts(plane)
        self._record = record
        self.columns = columns
        self._settings = settings
        self.kl_coef = settings.algorithm.kl_ctrl.kl_coef
        self.role_means: Mapping[str, float] = {}
        self._before = 0, self.kl_coef, self.role_means
        """(step, its coefficient and means) of the last call of `adv`, since a step can be
        repeated."""

    @tqbridge(reads=lambda step: step.filter)
    async def filter(self, data: BatchData, call: StageCall) -> FilterResult:
        """Name the prompts whose sessions differ in algorithm.filter_groups.metric."""
        (name,) = self.columns.filter
        values = data.dense(name).values.astype(np.float64)
        return FilterResult(uids=tuple(informative_prompts([RowKey.parse(key) for key in call.batch.keys], values)))

    @tqbridge(reads=("scores",))
    async def scores(self, data: BatchData) -> list[float]:
        """[N] the scores of the rows."""
        return data.dense("scores").values.tolist()

    @tqbridge(reads=("scores",), writes=("reward_baselines",), schema=TRAINER_SCHEMA)
    async def baseline(self, data: BatchData, call: StageCall) -> Output[StageResult]:
        """Write `reward_baselines`: for each trajectory, the score of the greedy response to its
        prompt.

        Where the reward function failed on the greedy response, the baseline is the mean score of
        the prompt's trajectories.
        """
        uids = [RowKey.parse(key).uid for key in call.batch.keys]
        rows = await self.plane.list_rows(BASELINE_PARTITION)
        scored = [key for key, tag in zip(rows.keys, rows.tags, strict=True) if FAILURE_TAG not in tag]
        greedy = rows.select_keys(scored)
        found = await self.scores(greedy) if greedy else []  # DataLostError if a storage unit lost their scores
        known = {RowKey.parse(key).uid: score for key, score in zip(greedy.keys, found, strict=True)}
        own = data.dense("scores").values
        places: dict[str, list[int]] = {}
        for i, uid in enumerate(uids):
            places.setdefault(uid, []).append(i)
        values = {uid: known[uid] if uid in known else float(own[rows].mean()) for uid, rows in places.items()}
        baselines = np.array([values[uid] for uid in uids], np.float32)
        columns = BatchData({"reward_baselines": dense(baselines)})
        return Output(columns=columns, result=StageResult(metrics=stats("critic/baseline", baselines)))

    @tqbridge(
        reads=lambda step: (
            "prompts",
            "responses",
            "response_mask",
            "scores",
            "acc",
            *step.old,
            *step.scored_policy,
            *step.estimated_from,
            *step.reference,
            *step.demonstration,
            *step.observation,
        ),
        reads_as=lambda step: step.old_as,
        writes=lambda step: (
            *step.advantages,
            *step.rejected,
            *step.weights,
            *step.chosen,
            *step.part_weights,
        ),
        schema=TRAINER_SCHEMA,
    )
    async def adv(self, data: BatchData, call: StageCall) -> Output[StageResult]:
        """Write `advantages`, `returns` and the other columns that updates read; report batch
        statistics.
        """
        settings = self._settings
        if self._before[0] == call.step:
            _, self.kl_coef, self.role_means = self._before
        self._before = call.step, self.kl_coef, self.role_means
        advantages = AdvantageSettings(
            algorithm=settings.algorithm,
            policy_loss=settings.policy_loss,
            response_length=settings.response_length,
            kl_coef=self.kl_coef,
            rng=np.random.default_rng((settings.seed, call.step)),
            role_means=self.role_means,
        )
        made = estimate_advantages(call.batch, data, advantages)
        self.role_means = made.role_means
        columns = made.columns.select_fields(declaration(self.adv, self.columns).writes)
        if self._record is not None and self._record.due(call.batch, call.step):
            await self._record.write(call.batch, call.step, data, columns)
        control = settings.algorithm.kl_ctrl
        if control.type == "adaptive" and made.reward_kl is not None:
            self.kl_coef = adaptive_kl_coef(
                self.kl_coef,
                made.reward_kl,
                target=control.target_kl,
                horizon=control.horizon,
                sequences=len(call.batch),
            )
        return Output(columns=columns, result=StageResult(metrics=made.metrics))
