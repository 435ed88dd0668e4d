"""Advantages and what belongs to them."""

from __future__ import annotations

from rl_app_ppo.config.verl_keys import conversions
from rl_app_ppo.config.verl_keys.aliases import BYPASS, OLD_LOG_PROB, our_value
from rl_app_ppo.config.verl_keys.key_entries import Entry, converted, no_effect, only, unsupported

ENTRIES: tuple[Entry, ...] = (
    converted(
        "algorithm.adv_estimator",
        "algorithm.adv_estimator",
        conversions.one_of("algorithm.adv_estimator", conversions.ESTIMATORS),
    ),
    converted(
        "algorithm.filter_groups.metric",
        "algorithm.filter_groups.metric",
        conversions.one_of("algorithm.filter_groups.metric", conversions.METRICS),
    ),
    converted(
        "algorithm.filter_groups.max_num_gen_batches",
        "algorithm.filter_groups.max_num_gen_batches",
        conversions.if_positive("algorithm.filter_groups.max_num_gen_batches"),
    ),
    no_effect("as many prompts are generated again as are missing", "algorithm.filter_groups.max_inflight_gen_batches"),
    converted(BYPASS, OLD_LOG_PROB, lambda value, _: {OLD_LOG_PROB: our_value(BYPASS, value)}),
    only(
        "algorithm.rollout_correction.loss_type",
        "ppo_clip",
        why="with algorithm.old_log_prob=rollout the loss is that of actor.policy_loss.loss_mode",
    ),
    unsupported("prompts are not weighted by their advantages", "algorithm.use_pf_ppo"),
    unsupported("prompts are not weighted by their advantages", "algorithm.pf_ppo.*", needs="algorithm.use_pf_ppo"),
    unsupported("a teacher is the model of reference.path with algorithm=opd", "distillation.enabled"),
    unsupported(
        "a teacher is the model of reference.path with algorithm=opd", "distillation.*", needs="distillation.enabled"
    ),
)
