"""Checks which settings can be combined, before any process starts."""

from __future__ import annotations

from rl_protocol import ConfigError
from rl_trainer.algorithms.advantages import ADVANTAGE_ESTIMATORS, estimators_read
from rl_trainer.algorithms.losses import POLICY_LOSSES
from rl_trainer.algorithms.old_log_prob import starts_from_rollout
from rl_trainer.config import ActorConfig, AlgorithmConfig, AsyncConfig, OverlongConfig
from rl_trainer.config.rollout_correction import SECOND_MOMENT
from rl_trainer.workers.columns import TASK_COLUMNS

WRITABLE = (
    *("values", "old_log_probs", "ref_log_prob", "sum_pi_squared", "reward_components", "reward_baselines"),
    *TASK_COLUMNS,
)
"""Columns beyond scores and masks that an estimator can read."""


def check_combination(
    algorithm: AlgorithmConfig, actor: ActorConfig, rollout_n: int, overlong: OverlongConfig | None = None
) -> None:
    """Refuse unknown names and settings that contradict each other.

    Args:
        algorithm: of the run.
        actor: of the run.
        rollout_n: responses per prompt.
        overlong: the penalty for long responses; None: there is none.

    Raises:
        ConfigError: names the settings, and what to set.
    """
    _check_parts(algorithm, actor, rollout_n)
    for one in algorithm.variants:
        _check_estimator(one, rollout_n)
        _check_nonnegative(one, overlong)
    _check_reward_parts(algorithm)
    _check_loss(algorithm, actor)


def check_staleness(async_rl: AsyncConfig, algorithm: AlgorithmConfig, actor: ActorConfig) -> None:
    """Refuse to train on responses of older weights where nothing limits or corrects the
    difference.

    Raises:
        ConfigError: names the settings, and what to set.
    """
    bound, loss = async_rl.max_staleness, actor.policy_loss.loss_mode
    if algorithm.old_log_prob == "interpolate" and bound < 2:
        raise ConfigError(
            "AlgorithmConfig.old_log_prob=interpolate approximates the policy of one version before, between the one being trained and one "
            f"of two or more versions before, which AsyncConfig.max_staleness={bound} excludes; set that to at least 2, or "
            "old_log_prob=rollout, which is the same there."
        )
    if not bound:
        return
    if (
        algorithm.trains_policy
        and not POLICY_LOSSES.get(loss).off_policy
        and not algorithm.rollout_correction.rollout_is
    ):
        raise ConfigError(
            f"AsyncConfig.max_staleness={bound} trains on responses of older weights, and PolicyLossConfig.loss_mode={loss} has neither a ratio to "
            "the old policy nor a correction; set RolloutCorrectionConfig.rollout_is=token, another loss_mode, or AsyncConfig.max_staleness=0."
        )
    if "reward_baselines" in estimators_read(algorithm):
        raise ConfigError(
            f"AlgorithmConfig.adv_estimator={_estimator_names(algorithm, 'reward_baselines')} generates its greedy responses when it trains, "
            f"with newer weights than the responses it compares them with; set AsyncConfig.max_staleness=0 (got {bound}), or another estimator."
        )


def _check_parts(algorithm: AlgorithmConfig, actor: ActorConfig, rollout_n: int) -> None:
    """Check the parts of the loss, and what demonstrations can't be combined with."""
    reads = estimators_read(algorithm)
    if not algorithm.trains_policy:
        _check_without_policy_loss(algorithm, actor, rollout_n, reads)
    _check_observations(algorithm, reads)
    _check_sources(algorithm, actor)
    if not algorithm.demonstrates:
        return
    refused = {
        f"AlgorithmConfig.adv_estimator={_estimator_names(algorithm, 'values')}": "values" in reads,
        "FilterGroupsConfig.enable=true": algorithm.filter_groups.enable,
        f"AlgorithmConfig.old_log_prob={algorithm.old_log_prob}": algorithm.trains_policy
        and starts_from_rollout(algorithm.old_log_prob),
    }
    for setting, given in refused.items():
        if given:
            coef = max(one.sft_coef for one in algorithm.variants)
            raise ConfigError(
                f"AlgorithmConfig.sft_coef={coef:g} adds an answer of the data to the responses of each prompt, which {setting} "
                "would take for a generated one; set another value, or sft_coef=0."
            )


def _check_observations(algorithm: AlgorithmConfig, reads: tuple[str, ...]) -> None:
    """Check what trained observations can't be combined with."""
    refused = {
        f"the critic of AlgorithmConfig.adv_estimator={_estimator_names(algorithm, 'values')}": "values" in reads,
        f"AlgorithmConfig.old_log_prob={algorithm.old_log_prob}": starts_from_rollout(algorithm.old_log_prob),
    }
    for setting, given in refused.items():
        if given and algorithm.trains_observations:
            coef = max(one.echo_coef for one in algorithm.variants)
            raise ConfigError(
                f"AlgorithmConfig.echo_coef={coef:g} adds tokens of the environment to the loss, which {setting} would take for "
                "generated ones; set another value, or echo_coef=0."
            )


def _check_sources(algorithm: AlgorithmConfig, actor: ActorConfig) -> None:
    """Check what AlgorithmConfig.by_source sets for single sources."""
    critics = {"values" in ADVANTAGE_ESTIMATORS.get(one.adv_estimator).reads for one in algorithm.variants}
    if len(critics) > 1:
        raise ConfigError(
            "AlgorithmConfig.by_source can't give some rows an estimator with a critic, such as gae, and others one without: the critic "
            f"learns the returns of all rows; got adv_estimator={_estimator_names(algorithm)}. Set estimators of one kind."
        )
    if critics == {True} and algorithm.trains_policy and not all(one.rl_coef for one in algorithm.variants):
        raise ConfigError(
            f"AlgorithmConfig.rl_coef=0 leaves some rows without returns, which the critic of adv_estimator={_estimator_names(algorithm)} "
            "would learn as returns of 0; set rl_coef above 0 in all rows, or an estimator without a critic."
        )
    for source in algorithm.sources:
        _check_estimator_settings(algorithm, source)
        if not trains_rows(algorithm, actor, source):
            raise ConfigError(
                f"AlgorithmConfig.by_source leaves nothing to train on in rows of data_source={source!r}; set rl_coef=1@{source} or "
                f"sft_coef=1@{source}, or leave the rows out of the data."
            )
    for source in algorithm.weigh_divergence:
        if not actor.use_kl_loss:
            raise ConfigError(
                f"AlgorithmConfig.by_source: ref_kl_coef@{source} weighs the divergence from the reference in the loss, which "
                "ActorConfig.use_kl_loss=false leaves out; set that to true, or leave ref_kl_coef out."
            )


def _check_estimator_settings(algorithm: AlgorithmConfig, source: str) -> None:
    """Check that the estimator of a source uses the settings that are set for it."""
    one = algorithm.for_source(source)
    used = ADVANTAGE_ESTIMATORS.get(one.adv_estimator).settings if one.rl_coef else ()
    for name in algorithm.estimator_settings_of(source):
        if name not in used:
            why = f"adv_estimator={one.adv_estimator}" if one.rl_coef else "rl_coef=0"
            users = [e for e in ADVANTAGE_ESTIMATORS.names() if name in ADVANTAGE_ESTIMATORS.get(e).settings]
            raise ConfigError(
                f"AlgorithmConfig.by_source: {name}@{source} has no effect with {why}; leave it out, or set adv_estimator to one that uses "
                f"{name}: {', '.join(users)}."
            )


def trains_rows(algorithm: AlgorithmConfig, actor: ActorConfig, data_source: str) -> bool:
    """Whether anything is trained on rows of a data source."""
    one = algorithm.for_source(data_source)
    divergence = actor.use_kl_loss and algorithm.ref_kl_coef(data_source)
    return bool(one.rl_coef or one.sft_coef or one.echo_coef or divergence)


def _estimator_names(algorithm: AlgorithmConfig, column: str = "") -> str:
    """The estimators of a run, or those that read a column."""
    names = dict.fromkeys(one.adv_estimator for one in algorithm.variants)
    return " and ".join(name for name in names if not column or column in ADVANTAGE_ESTIMATORS.get(name).reads)


def _check_without_policy_loss(
    algorithm: AlgorithmConfig, actor: ActorConfig, rollout_n: int, reads: tuple[str, ...]
) -> None:
    correction = algorithm.rollout_correction
    useless = {
        f"AlgorithmConfig.adv_estimator={_estimator_names(algorithm)}": bool(reads),
        "AlgorithmConfig.router_replay=R2": algorithm.router_replay == "R2",
        "AlgorithmConfig.use_kl_in_reward=true": algorithm.use_kl_in_reward,
        "RolloutCorrectionConfig.rollout_is": bool(correction.rollout_is),
        "RolloutCorrectionConfig.rollout_rs": bool(correction.rollout_rs),
    }
    for setting, given in useless.items():
        if given:
            raise ConfigError(
                f"AlgorithmConfig.rl_coef=0 computes no policy loss and no advantages, for which {setting} is; leave it at its default, or set "
                "rl_coef above 0."
            )
    if not (algorithm.demonstrates or algorithm.trains_observations) and not actor.use_kl_loss:
        raise ConfigError(
            "AlgorithmConfig.rl_coef=0 leaves nothing to train on; set AlgorithmConfig.sft_coef above 0, or ActorConfig.use_kl_loss=true."
        )
    if algorithm.demonstrates and not actor.use_kl_loss and rollout_n > 1:
        raise ConfigError(
            f"RolloutConfig.n must be 1 with AlgorithmConfig.rl_coef=0 and sft_coef above 0, which train on the data's answer to each prompt "
            f"alone; got {rollout_n}."
        )


def _check_estimator(algorithm: AlgorithmConfig, rollout_n: int) -> None:
    name = algorithm.adv_estimator
    estimator, given = ADVANTAGE_ESTIMATORS.get(name), int(algorithm.sft_coef > 0)
    least = given + (2 if estimator.compares else 1)
    if algorithm.rl_coef and rollout_n < least:
        compares = ", which compares the responses of a prompt" if estimator.compares else ""
        answer = ", of which AlgorithmConfig.sft_coef above 0 makes one the data's answer" if given else ""
        raise ConfigError(
            f"RolloutConfig.n must be at least {least} with AlgorithmConfig.adv_estimator={name}{compares}{answer}; got {rollout_n}."
        )
    unknown = [column for column in estimator.reads if column not in WRITABLE]
    if unknown:
        raise ConfigError(
            f"AlgorithmConfig.adv_estimator={name!r} reads {', '.join(unknown)}, which no stage writes; there are {', '.join(WRITABLE)}."
        )
    if "reward_components" in estimator.reads and algorithm.use_kl_in_reward:
        raise ConfigError(
            f"AlgorithmConfig.adv_estimator={name} looks at the parts of the reward alone, not at AlgorithmConfig.use_kl_in_reward=true; "
            "set it to false and ActorConfig.use_kl_loss to true."
        )
    if "ref_log_prob" in estimator.reads and algorithm.use_kl_in_reward:
        raise ConfigError(
            f"AlgorithmConfig.adv_estimator={name} rewards the log-probs of the teacher alone, not AlgorithmConfig.use_kl_in_reward=true; "
            "set it to false."
        )
    mode = algorithm.old_log_prob
    if "sum_pi_squared" in estimator.reads and starts_from_rollout(mode):
        raise ConfigError(
            f"AlgorithmConfig.adv_estimator={name} needs the old_log_prob stage, which AlgorithmConfig.old_log_prob={mode} leaves out; "
            "set it to auto or recompute."
        )


def _check_nonnegative(algorithm: AlgorithmConfig, overlong: OverlongConfig | None) -> None:
    """Refuse to subtract from rewards that must not be negative."""
    if not (ADVANTAGE_ESTIMATORS.get(algorithm.adv_estimator).nonnegative and algorithm.rl_coef):
        return
    needs = f"AlgorithmConfig.adv_estimator={algorithm.adv_estimator} needs rewards of at least 0, and"
    if algorithm.use_kl_in_reward:
        raise ConfigError(
            f"{needs} AlgorithmConfig.use_kl_in_reward=true subtracts the divergence from them; set it to false and "
            "ActorConfig.use_kl_loss to true, or another estimator."
        )
    if overlong is not None and overlong.buffer_len:
        raise ConfigError(
            f"{needs} OverlongConfig.buffer_len={overlong.buffer_len} subtracts from those of long responses; set it to 0, "
            "or another estimator."
        )


def _check_reward_parts(algorithm: AlgorithmConfig) -> None:
    if ("reward_components" in estimators_read(algorithm)) != bool(algorithm.gdpo_reward_keys):
        raise ConfigError(
            f"AlgorithmConfig.gdpo_reward_keys goes with an estimator that looks at parts of the reward, such as gdpo, and only with it; "
            f"got {algorithm.gdpo_reward_keys!r} and AlgorithmConfig.adv_estimator={_estimator_names(algorithm)}."
        )


def _check_loss(algorithm: AlgorithmConfig, actor: ActorConfig) -> None:
    name, correction = actor.policy_loss.loss_mode, algorithm.rollout_correction
    mode, loss = algorithm.old_log_prob, POLICY_LOSSES.get(name)
    if loss.per_sequence and actor.loss_agg_mode != "seq-mean-token-mean":
        raise ConfigError(
            f"PolicyLossConfig.loss_mode={name} is one loss per response; "
            f"set ActorConfig.loss_agg_mode=seq-mean-token-mean (got {actor.loss_agg_mode})."
        )
    if loss.per_sequence and correction.rollout_is == "token":
        raise ConfigError(
            f"PolicyLossConfig.loss_mode={name} is one loss per response, which can't be weighted per token; "
            "set RolloutCorrectionConfig.rollout_is to sequence or geometric."
        )
    if mode == "interpolate" and not loss.off_policy:
        raise ConfigError(
            f"AlgorithmConfig.old_log_prob=interpolate is for losses with a ratio to the old policy, and loss_mode={name} has none; set "
            "old_log_prob=rollout, or another PolicyLossConfig.loss_mode."
        )
    if mode == "rollout" and correction.rollout_is and loss.off_policy:
        raise ConfigError(
            f"With AlgorithmConfig.old_log_prob=rollout the ratio of loss_mode={name} is to the rollout engine's policy already, so "
            "importance weights would count it twice; leave rollout_is empty, or set PolicyLossConfig.loss_mode=gpg."
        )
    if starts_from_rollout(mode) and SECOND_MOMENT in correction.rollout_rs:
        raise ConfigError(
            f"RolloutCorrectionConfig.rollout_rs={SECOND_MOMENT} looks at the whole batch at once, which AlgorithmConfig.old_log_prob={mode} never "
            "has; set it to recompute, or another criterion."
        )
    if starts_from_rollout(mode) and correction.rollout_is_batch_normalize:
        raise ConfigError(
            "RolloutCorrectionConfig.rollout_is_batch_normalize needs the weights of the whole batch at once, which "
            f"AlgorithmConfig.old_log_prob={mode} never has; set it to recompute, or rollout_is_batch_normalize to false."
        )
