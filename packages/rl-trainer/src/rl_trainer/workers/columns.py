"""Columns of trajectory rows: their schema, and those that depend on the settings of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import methodcaller

from rl_protocol import KVBatchMeta, Scalar, Tag
from rl_protocol.batch.schema import BatchSchema, ColumnSpec, SameLength
from rl_protocol.rl_columns import (
    IMAGE_COLUMNS,
    KEPT_COLUMNS,
    ROUTED_COLUMNS,
    TEACHER_PROMPTS,
    TRAIN_PARTITION,
    TRAJECTORY_SCHEMA,
    VALIDATION_PARTITION,
)
from rl_trainer.algorithms.advantages import estimators_read
from rl_trainer.algorithms.loss_parts import loss_parts
from rl_trainer.algorithms.losses import POLICY_LOSSES
from rl_trainer.algorithms.old_log_prob import old_log_prob_mode, starts_from_rollout
from rl_trainer.config import ActorConfig, AlgorithmConfig

BASELINE_PARTITION = "baseline"
"""Partition of greedy responses, which exists while a step needs their scores."""

PARTITIONS = (TRAIN_PARTITION, VALIDATION_PARTITION, BASELINE_PARTITION)
"""Partitions that prompts are rolled out into."""

REFERENCE_TOP = ("ref_top_log_probs", "ref_top_tokens")
"""The most probable tokens of the reference policy."""
PART_WEIGHTS = ("rl_weights", "ce_weights", "ref_kl_weights")
"""Weights of the parts of a token's loss."""

_BETWEEN_STAGES = (
    ColumnSpec(
        name="sum_pi_squared",
        kind="ragged",
        dtype="float32",
        writer="old_log_prob",
        meaning="sum over the vocabulary of squared probabilities before the update",
    ),
    ColumnSpec(
        name="reward_components",
        kind="ragged",
        dtype="float32",
        writer="reward",
        meaning="parts of the reward, in the order of AlgorithmConfig.gdpo_reward_keys",
    ),
    ColumnSpec(
        name="reward_baselines",
        kind="dense",
        dtype="float32",
        writer="baseline",
        meaning="score of the greedy response to the same prompt",
    ),
    ColumnSpec(
        name="loss_mask",
        kind="ragged",
        dtype="bool",
        writer="adv",
        meaning="response_mask without what the rollout correction rejects, with observations that are trained on",
    ),
    ColumnSpec(
        name="rollout_is_weights",
        kind="ragged",
        dtype="float32",
        writer="adv",
        meaning="importance weight of the rollout correction, 0 where masked",
    ),
    ColumnSpec(
        name="demonstration",
        kind="ragged",
        dtype="bool",
        writer="rollout",
        meaning="tokens of the data's answer, which no policy generated",
    ),
    ColumnSpec(
        name="observation",
        kind="ragged",
        dtype="bool",
        writer="rollout",
        meaning="tokens that tools and environments answered to an agent",
    ),
    ColumnSpec(
        name="ref_top_log_probs",
        kind="ragged",
        dtype="float32",
        writer="ref",
        meaning="the K largest log-probs of the reference at each token, K values for each",
    ),
    ColumnSpec(
        name="ref_top_tokens",
        kind="ragged",
        dtype="int32",
        writer="ref",
        meaning="the tokens that have them",
    ),
    *(
        ColumnSpec(
            name=f"{part}_weights",
            kind="ragged",
            dtype="float32",
            writer="adv",
            meaning=f"weight of the part {part} of the loss",
        )
        for part in ("rl", "ce", "ref_kl")
    ),
    ColumnSpec(
        name="chosen_tokens", kind="ragged", dtype="bool", writer="adv", meaning="tokens chosen by clip-cov or kl-cov"
    ),
)

TRAINER_SCHEMA = BatchSchema(
    (*TRAJECTORY_SCHEMA.columns.values(), *_BETWEEN_STAGES),
    laws=(
        *TRAJECTORY_SCHEMA.laws,
        SameLength(
            (
                "responses",
                "sum_pi_squared",
                "loss_mask",
                "rollout_is_weights",
                "chosen_tokens",
                "demonstration",
                "observation",
                *PART_WEIGHTS,
            )
        ),
        SameLength(("ref_top_log_probs", "ref_top_tokens")),
        SameLength(("advantages", "returns", "loss_mask", "rollout_is_weights", "chosen_tokens", *PART_WEIGHTS)),
    ),
)

ROW_TAG = "row"
"""Tag of a prompt: its row in the data set."""
TRUNCATED = "truncated"
"""Tag of a trajectory that ended at rollout.response_length, not with the end of sequence."""
NEWEST_VERSION = "newest_version"
"""Tag of a trajectory that several versions of the weights generated; `version` is the oldest."""


def weight_versions(tags: Sequence[Tag]) -> tuple[list[Scalar], list[Scalar]]:
    """The oldest and the newest version of the weights that generated each trajectory, [N] and [N];
    None: the tag of a trajectory has none.
    """
    oldest = list(map(methodcaller("get", "version"), tags))
    newest = list(map(methodcaller("get", NEWEST_VERSION), tags))
    if newest.count(None) == len(newest):
        return oldest, oldest
    return oldest, [first if last is None else last for first, last in zip(oldest, newest, strict=True)]


TASK_COLUMNS = ("data_source", "ground_truth", "extra_info")
"""Columns of a prompt that reward functions read."""
MASK_AS = {"loss_mask": "response_mask"}
"""Name of the mask in the losses, which do not depend on rejection."""
FILTER_COLUMNS = {"acc": "acc", "score": "scores"}
"""Column of each algorithm.filter_groups.metric."""
OLD_LOG_PROB = "old_log_prob"
"""Key of a batch's extra_info, which is ROLLOUT if the step takes the engine's log-probs."""
ROLLOUT = "rollout"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepColumns:
    """The columns that depend on the settings of a run; empty: the run has none.

    The declarations of worker methods (`tqbridge`) are functions of this.

    Attributes:
        images: of prompts, for a policy that sees images.
        kept: the tokens from which each token was sampled, where log-probs are over these.
        routed: the experts of each token, where the actor replays those of the rollout.
        recorded: the same, where the update replays those of the stage `old_log_prob`.
        teacher_prompts: what the reference policy sees in place of the prompts.
        reward_components: parts of the reward.
        filter: decides which prompts are informative.
        old: log-probs that the ratio of the policy loss is to: of the actor before its update, or
            of the rollout engine.
        old_as: renames them to `old_log_probs`.
        sum_pi_squared: that statistic of the policy before its update.
        scored_policy: further columns of the two policies that `adv` compares.
        estimated_from: what the advantage estimator reads beyond scores and masks.
        reference: log-probs of the reference policy.
        reference_loss: the same, if the policy loss reads them.
        reference_top: the most probable tokens of the reference, which the policy update reads.
        rejected: the mask of losses where it is not `response_mask`: without what the rollout
            correction rejects, with observations that are trained on.
        weights: importance weights of the rollout correction.
        chosen: tokens that the policy loss treats differently.
        versions: of the weights that generated each token, for interpolated old log-probs.
        demonstration: tokens that the data gave.
        observation: tokens that the environment of an agent gave, where they are trained on.
        advantages: what the policy loss and the value loss read; empty: there is no policy loss.
        part_weights: weights of the parts of a token's loss that are not the same for all tokens.
    """

    images: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    routed: tuple[str, ...] = ()
    recorded: tuple[str, ...] = ()
    teacher_prompts: tuple[str, ...] = ()
    reward_components: tuple[str, ...] = ()
    filter: tuple[str, ...] = ()
    old: tuple[str, ...] = ("old_log_probs",)
    old_as: Mapping[str, str] = field(default_factory=dict[str, str])
    sum_pi_squared: tuple[str, ...] = ()
    scored_policy: tuple[str, ...] = ("entropy", "rollout_log_probs")
    estimated_from: tuple[str, ...] = ()
    reference: tuple[str, ...] = ()
    reference_loss: tuple[str, ...] = ()
    reference_top: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    demonstration: tuple[str, ...] = ()
    observation: tuple[str, ...] = ()
    advantages: tuple[str, ...] = ("advantages", "returns")
    part_weights: tuple[str, ...] = ()

    @property
    def tokens(self) -> tuple[str, ...]:
        """What a model reads to compute over a trajectory."""
        return ("prompts", "responses", *self.images)

    @property
    def sampled_tokens(self) -> tuple[str, ...]:
        """What a policy reads to compute the log-probs of a trajectory."""
        return (*self.tokens, *self.kept, *self.routed)

    @property
    def reference_tokens(self) -> tuple[str, ...]:
        """What a reference policy reads to compute the log-probs of a trajectory."""
        prompts = self.teacher_prompts or ("prompts",)
        return (*prompts, "responses", *self.images, *self.kept)

    @property
    def mask(self) -> tuple[str, ...]:
        """The mask that losses read, which they know as `response_mask`."""
        return self.rejected or ("response_mask",)

    def for_batch(self, meta: KVBatchMeta) -> StepColumns:
        """The columns of the step that these rows belong to."""
        return self.with_rollout_log_probs() if meta.extra_info.get(OLD_LOG_PROB) == ROLLOUT else self

    def with_rollout_log_probs(self) -> StepColumns:
        """The columns of a step that takes the rollout engine's log-probs for the old ones."""
        return replace(
            self, old=("rollout_log_probs",), old_as={"rollout_log_probs": "old_log_probs"}, scored_policy=()
        )


def step_columns(
    algorithm: AlgorithmConfig, actor: ActorConfig, *, images: bool = False, kept: bool = False
) -> StepColumns:
    """The columns of a run with these settings; with `images`, for a policy that sees images, and
    with `kept`, for log-probs over the tokens that top-p and top-k keep.

    Raises:
        ConfigError: the advantage estimator or policy loss is unknown.
    """
    reads = estimators_read(algorithm)
    loss, correction = POLICY_LOSSES.get(actor.policy_loss.loss_mode), algorithm.rollout_correction
    filtering, mode = algorithm.filter_groups, old_log_prob_mode(algorithm)
    from_engine = starts_from_rollout(mode)
    reads_reference = algorithm.use_kl_in_reward or actor.use_kl_loss or "ref_log_prob" in reads
    reference = ("ref_log_prob",) if reads_reference else ()
    parts = loss_parts(algorithm, actor)
    read = dict.fromkeys((*reads, *(("data_source",) if algorithm.by_source else ())))
    columns = StepColumns(
        images=IMAGE_COLUMNS if images else (),
        kept=KEPT_COLUMNS if kept else (),
        routed=ROUTED_COLUMNS if algorithm.router_replay == "R3" else (),
        recorded=ROUTED_COLUMNS if algorithm.router_replay == "R2" else (),
        teacher_prompts=(TEACHER_PROMPTS,) if algorithm.teacher_context else (),
        reward_components=("reward_components",) if algorithm.gdpo_reward_keys else (),
        filter=(FILTER_COLUMNS[filtering.metric],) if filtering.enable else (),
        sum_pi_squared=("sum_pi_squared",) if "sum_pi_squared" in reads else (),
        estimated_from=tuple(name for name in read if name not in ("old_log_probs", "ref_log_prob")),
        reference=reference,
        reference_loss=reference if actor.use_kl_loss and not actor.kl_loss_topk else (),
        reference_top=REFERENCE_TOP if actor.use_kl_loss and actor.kl_loss_topk else (),
        rejected=("loss_mask",) if parts.observations or (correction.rollout_rs and not from_engine) else (),
        weights=("rollout_is_weights",) if correction.rollout_is and not from_engine else (),
        chosen=("chosen_tokens",) if loss.chooses else (),
        versions=("rollout_versions",) if mode == "interpolate" else (),
        demonstration=("demonstration",) if parts.demonstrations else (),
        observation=("observation",) if parts.observations else (),
        part_weights=parts.columns,
    )
    if not parts.rl:
        return replace(columns, old=(), scored_policy=(), advantages=(), chosen=())
    return columns.with_rollout_log_probs() if from_engine else columns
