"""The step as a graph of stages that declare which columns they read and write. It is checked before any model loads.

rollout -> reward -> filter? -> baseline? -> old_log_prob? -> ref? -> values? -> adv -> update_critic? -> update_actor -> update_weights -> clear
                                                                                           (? where the configuration asks for it)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rl_protocol import BatchData, BatchSchema, ConfigError
from rl_protocol.flow import check_flow
from rl_protocol.rl_columns import IMAGE_COLUMNS, PROMPT_SCHEMA
from rl_trainer.algorithms.advantages import ADVANTAGE_ESTIMATORS
from rl_trainer.algorithms.policy_losses import POLICY_LOSSES
from rl_trainer.columns import TRAINER_SCHEMA
from rl_trainer.config import ActorConfig, AlgorithmConfig

FILTER_COLUMNS = {"acc": "acc", "score": "scores"}
"""algorithm.filter_groups.metric -> the column that holds it."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of the step: only the columns it reads travel to it.

    `known_as` gives a column another name within the stage: a stage that reads `loss_mask` as `response_mask` need not know of rejection.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    known_as: Mapping[str, str] = field(default_factory=dict[str, str])

    def rename(self, data: BatchData) -> BatchData:
        """The columns under the names this stage knows them by."""
        return BatchData({self.known_as.get(name, name): column for name, column in data.columns.items()}, len(data))


@dataclass(frozen=True, slots=True)
class StepGraph:
    """The stages of one step, in order."""

    stages: tuple[Stage, ...]

    def __getitem__(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)

    def __contains__(self, name: object) -> bool:
        return any(stage.name == name for stage in self.stages)


def check_graph(stages: Sequence[Stage], schemas: Sequence[BatchSchema] = (PROMPT_SCHEMA, TRAINER_SCHEMA)) -> StepGraph:
    """Check that every column read was written by an earlier stage, that no column is written twice, and that all are declared.

    Raises:
        ConfigError: names the stage and the column.
    """
    check_flow(stages)
    for stage in stages:
        for name in stage.writes:
            if not any(name in schema for schema in schemas):
                raise ConfigError(f"Step {stage.name!r} writes column {name!r}, which no schema declares.")
    return StepGraph(tuple(stages))


def needs_critic(algorithm: AlgorithmConfig) -> bool:
    """Whether the advantage estimator reads values."""
    return "values" in ADVANTAGE_ESTIMATORS.get(algorithm.adv_estimator).reads


def needs_baseline(algorithm: AlgorithmConfig) -> bool:
    """Whether the advantage estimator reads the score of a greedy response."""
    return "reward_baselines" in ADVANTAGE_ESTIMATORS.get(algorithm.adv_estimator).reads


def needs_sum_pi_squared(algorithm: AlgorithmConfig) -> bool:
    """Whether the advantage estimator reads sums of squared probabilities."""
    return "sum_pi_squared" in ADVANTAGE_ESTIMATORS.get(algorithm.adv_estimator).reads


def needs_reference(algorithm: AlgorithmConfig, actor: ActorConfig) -> bool:
    """Whether anything reads the reference policy's log-probs."""
    return algorithm.use_kl_in_reward or actor.use_kl_loss


def build_graph(algorithm: AlgorithmConfig, actor: ActorConfig, *, images: bool = False) -> StepGraph:
    """The checked graph of a step; with `images`, of a policy that sees them.

    Raises:
        ConfigError: unknown advantage estimator or policy loss, or columns that do not fit together.
    """
    estimator = ADVANTAGE_ESTIMATORS.get(algorithm.adv_estimator)
    loss, correction = POLICY_LOSSES.get(actor.policy_loss.loss_mode), algorithm.rollout_correction
    filtering = algorithm.filter_groups
    critic, ref, bypass = needs_critic(algorithm), needs_reference(algorithm, actor), correction.bypass_mode
    pixels = IMAGE_COLUMNS if images else ()
    read = ("prompts", "responses")
    tokens = (*read, *pixels)
    old = ("rollout_log_probs",) if bypass else ("old_log_probs",)
    rejected = ("loss_mask",) if not bypass and correction.rollout_rs else ()
    mask = rejected or ("response_mask",)
    known_as = {"rollout_log_probs": "old_log_probs"} if bypass else {}
    weights = ("rollout_is_weights",) if not bypass and correction.rollout_is else ()
    chosen = ("chosen_tokens",) if loss.chooses else ()
    task = ("data_source", "ground_truth", "extra_info")
    rollout = ("prompts", *pixels, *task, "responses", "response_mask", "rollout_log_probs")
    components = ("reward_components",) if algorithm.component_keys() else ()
    old_writes = ("old_log_probs", "entropy", *(("sum_pi_squared",) if needs_sum_pi_squared(algorithm) else ()))
    reference = ("ref_log_prob",) if ref else ()
    extra = tuple(name for name in estimator.reads if name != "old_log_probs")
    scored = (*read, "response_mask", "scores", "acc", *old, *(() if bypass else ("entropy", "rollout_log_probs")))
    stages = [
        Stage("rollout", (), rollout),
        Stage("reward", ("responses", *task), ("scores", "acc", *components)),
        *([Stage("filter", (FILTER_COLUMNS[filtering.metric],), ())] if filtering.enable else []),
        *([Stage("baseline", ("scores",), ("reward_baselines",))] if needs_baseline(algorithm) else []),
        *([] if bypass else [Stage("old_log_prob", tokens, old_writes)]),
        *([Stage("ref", tokens, reference)] if ref else []),
        *([Stage("values", tokens, ("values",))] if critic else []),
        Stage(
            "adv",
            (*scored, *extra, *reference),
            ("advantages", "returns", *rejected, *weights, *chosen),
            known_as,
        ),
        *(
            [Stage("update_critic", (*tokens, *mask, "values", "returns"), (), {"loss_mask": "response_mask"})]
            if critic
            else []
        ),
        Stage(
            "update_actor",
            (*tokens, *mask, *old, "advantages", *(reference if actor.use_kl_loss else ()), *weights, *chosen),
            (),
            {**known_as, "loss_mask": "response_mask"},
        ),
    ]
    return check_graph(stages)
