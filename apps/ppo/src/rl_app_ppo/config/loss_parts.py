"""What the parts of the loss read, and the check that the rest of the configuration fits them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_protocol.support.options import require

if TYPE_CHECKING:
    from rl_app_ppo.config.schema import AppConfig

DISTILLATION = "opd"
"""Estimator of advantages that no reward has a part in."""


def learns_from_rewards(config: AppConfig) -> bool:
    """Whether the advantages of a step come from the rewards of several responses."""
    algorithm = config.algorithm
    rewarded = any(one.rl_coef > 0 and one.adv_estimator != DISTILLATION for one in algorithm.variants)
    return rewarded and config.data.train_batch_size * config.rollout.n > 1


def check_loss_parts(config: AppConfig, path: str) -> None:
    """Check the reference policy of distillation, and the temperature of cross-entropy.

    Args:
        config: the configuration of the run.
        path: prefix of its keys.

    Raises:
        ConfigError: names the key, and what it must be.
    """
    algorithm = config.algorithm
    # where nothing is learned but the reference policy, it must be another model
    distils = any(one.adv_estimator == DISTILLATION and one.rl_coef > 0 for one in algorithm.variants) or not (
        algorithm.trains_policy or algorithm.demonstrates
    )
    require(
        not distils or bool(config.reference.path or algorithm.teacher_context),
        f"{path}reference.path",
        "the teacher's checkpoint folder, unless algorithm.teacher_context is set, with algorithm.adv_estimator=opd, and where the divergence "
        "from the reference is the only loss",
        config.reference.path,
    )
    require(
        not (algorithm.teacher_is_policy and config.reference.path),
        f"{path}reference.path",
        "empty with algorithm.teacher_is_policy=true",
        config.reference.path,
    )
    require(
        not algorithm.teacher_ema or config.backend.averages_weights,
        f"{path}algorithm.teacher_ema",
        f"0 with model_engine={config.model_engine}, which keeps no moving average of the weights",
        algorithm.teacher_ema,
    )
    require(
        not algorithm.trains_observations or config.rollout.session != "single_turn",
        f"{path}algorithm.echo_coef",
        "0 with rollout.session=single_turn, whose responses have no observations",
        max(one.echo_coef for one in algorithm.variants),
    )
    require(
        config.rollout.temperature == 1 or not (config.demonstrates or algorithm.trains_observations),
        f"{path}rollout.temperature",
        "1 with algorithm.sft_coef or echo_coef above 0: log-probs are those of the policy at this temperature, and so is the cross-entropy",
        config.rollout.temperature,
    )
