"""Names and schemas of the RL columns. The transports (rl_transferqueue, rl_ckpt_engine) never
import this module.

A prompt row (key: uid) holds what its n trajectories share; a trajectory row (key: RowKey text)
holds the rest. A column without an `absence` is part of the first put of its row.
"""

from __future__ import annotations

from rl_protocol.batch.packed_arrays import SHAPES_SUFFIX
from rl_protocol.batch.schema import (
    BatchSchema,
    ColumnSpec,
    DistinctIds,
    LengthIsProduct,
    LengthIsRuns,
    LengthIsSum,
    SameLength,
)

TRAIN_PARTITION = "train"
VALIDATION_PARTITION = "val"
PROMPT_SUFFIX = "/prompts"
"""Prompt rows are in the partition named like that of their trajectories, plus this suffix."""

PATCHES, GRIDS = "image_patches", "image_grids"
IMAGE_COLUMNS = (PATCHES, PATCHES + SHAPES_SUFFIX, GRIDS)
"""The image columns that a vision-language policy reads."""
TEACHER_PROMPTS = "teacher_prompts"
"""The prompt that the reference policy sees in place of the policy's."""
KEPT_COLUMNS = ("kept_counts", "kept_words")
"""The tokens that top-p and top-k kept where each response token was sampled (`KeptSets`)."""
ROUTED = "routed_experts"
ROUTED_COLUMNS = (ROUTED, ROUTED + SHAPES_SUFFIX)
"""The experts that computed each token, packed by `rl_protocol.batch.packed_arrays`: for each row
one array of `rl_protocol.batch.routed_experts.ExpertIds`."""
_BLIND = "the policy reads text alone"
_FREE = "the routers of the policy choose the experts in each pass"
_UNREPLAYED = "tokens are sampled from all, or log-probs are over all"

PROMPT_SCHEMA = BatchSchema(
    (
        ColumnSpec(name="prompts", kind="ragged", dtype="int64", writer="rollout", meaning="prompt token ids"),
        ColumnSpec(
            name=TEACHER_PROMPTS,
            kind="ragged",
            dtype="int64",
            writer="rollout",
            meaning="prompt token ids of the reference policy",
            absence="the reference policy sees the prompt of the policy",
        ),
        ColumnSpec(name="data_source", kind="object", writer="rollout", meaning="name of the data set, str"),
        ColumnSpec(
            name="ground_truth", kind="object", writer="rollout", meaning="what the reward function compares with, str"
        ),
        ColumnSpec(
            name="extra_info", kind="object", writer="rollout", meaning="further facts for the reward function, by name"
        ),
        ColumnSpec(
            name=PATCHES,
            kind="ragged",
            dtype="float32",
            writer="rollout",
            meaning="patches of all images, packed by rl_protocol.batch.packed_arrays",
            absence=_BLIND,
        ),
        ColumnSpec(
            name=PATCHES + SHAPES_SUFFIX,
            kind="ragged",
            dtype="int64",
            dims=(2,),
            writer="rollout",
            meaning="of each image: patches, numbers of a patch",
            absence=_BLIND,
        ),
        ColumnSpec(
            name=GRIDS,
            kind="ragged",
            dtype="int64",
            dims=(3,),
            writer="rollout",
            meaning="of each image: patches in time, height and width",
            absence=_BLIND,
        ),
    ),
    laws=(LengthIsProduct(PATCHES, PATCHES + SHAPES_SUFFIX), SameLength((PATCHES + SHAPES_SUFFIX, GRIDS))),
)
"""Columns of prompt rows."""

TRAJECTORY_SCHEMA = BatchSchema(
    (
        ColumnSpec(
            name="responses", kind="ragged", dtype="int64", writer="rollout", meaning="response token ids, eos included"
        ),
        ColumnSpec(
            name="response_mask",
            kind="ragged",
            dtype="bool",
            writer="rollout",
            meaning="true where the policy made the token",
        ),
        ColumnSpec(
            name="rollout_log_probs",
            kind="ragged",
            dtype="float32",
            writer="rollout",
            meaning="log-prob when sampled, nats",
        ),
        ColumnSpec(
            name="rollout_versions",
            kind="ragged",
            dtype="int32",
            dims=(2,),
            writer="rollout",
            meaning="runs of [version of the weights, tokens of the response that it generated]",
        ),
        ColumnSpec(
            name="kept_counts",
            kind="ragged",
            dtype="int32",
            writer="rollout",
            meaning="words of the set of tokens from which each token was sampled; 0: from all",
            absence=_UNREPLAYED,
        ),
        ColumnSpec(
            name="kept_words",
            kind="ragged",
            dtype="int32",
            writer="rollout",
            meaning="these sets, by rl_protocol.KeptSets",
            absence=_UNREPLAYED,
        ),
        ColumnSpec(
            name=ROUTED,
            kind="ragged",
            dtype="int16",
            writer="rollout",
            meaning="experts of each token with a forward pass and layer, by rl_protocol.batch.routed_experts; -1: not recorded",
            absence=_FREE,
        ),
        ColumnSpec(
            name=ROUTED + SHAPES_SUFFIX,
            kind="ragged",
            dtype="int64",
            dims=(3,),
            writer="rollout",
            meaning="one shape: tokens of prompt and response that have a forward pass, layers with experts, experts of a token",
            absence=_FREE,
        ),
        ColumnSpec(
            name="scores",
            kind="dense",
            dtype="float32",
            writer="reward",
            meaning="score of the whole response",
            absence="not scored yet",
        ),
        ColumnSpec(
            name="acc",
            kind="dense",
            dtype="float32",
            writer="reward",
            meaning="1 where the answer is right, else 0",
            absence="not scored yet",
        ),
        ColumnSpec(
            name="old_log_probs",
            kind="ragged",
            dtype="float32",
            writer="old_log_prob",
            meaning="log-prob before the update, nats",
            absence="the stage has not run yet",
        ),
        ColumnSpec(
            name="entropy",
            kind="ragged",
            dtype="float32",
            writer="old_log_prob",
            meaning="entropy before the update, nats",
            absence="the stage has not run yet",
        ),
        ColumnSpec(
            name="ref_log_prob",
            kind="ragged",
            dtype="float32",
            writer="ref",
            meaning="log-prob of the reference policy, nats",
            absence="no divergence from a reference policy is used",
        ),
        ColumnSpec(
            name="values",
            kind="ragged",
            dtype="float32",
            writer="values",
            meaning="V(s_t) of the critic before the update",
            absence="the advantage estimator needs no critic",
        ),
        ColumnSpec(
            name="advantages",
            kind="ragged",
            dtype="float32",
            writer="adv",
            meaning="advantage per token, 0 where masked",
            absence="not estimated yet",
        ),
        ColumnSpec(
            name="returns",
            kind="ragged",
            dtype="float32",
            writer="adv",
            meaning="return per token, 0 where masked",
            absence="not estimated yet",
        ),
    ),
    laws=(
        SameLength(
            (
                "responses",
                "response_mask",
                "rollout_log_probs",
                "kept_counts",
                "old_log_probs",
                "entropy",
                "ref_log_prob",
                "values",
                "advantages",
                "returns",
            )
        ),
        LengthIsRuns("responses", "rollout_versions"),
        LengthIsSum("kept_words", "kept_counts"),
        LengthIsProduct(ROUTED, ROUTED + SHAPES_SUFFIX),
        DistinctIds(ROUTED, ROUTED + SHAPES_SUFFIX),
    ),
)
"""Columns of trajectory rows."""


def prompt_partition(partition: str) -> str:
    """The partition that holds the prompt rows of `partition`."""
    return partition + PROMPT_SUFFIX
