"""Options of the algorithm: how advantages are computed from rewards."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rl_protocol import ConfigError
from rl_protocol.support.options import Options, condition, group, option, require
from rl_trainer.config.kl import KL_PENALTIES, kl_name
from rl_trainer.config.rollout_correction import RolloutCorrectionConfig

KL_CONTROLLERS = ("fixed", "adaptive")


ANSWER = "{answer}"
"""Stands for the data's answer in `AlgorithmConfig.teacher_context`."""


FILTER_METRICS = ("acc", "score")


ROUTER_REPLAYS = ("disabled", "R2", "R3")


DISCOUNTS = ("gamma", "lam")
"""Settings of a source that are from 0 to 1."""


ESTIMATOR_SETTINGS = (*DISCOUNTS, "norm_adv_by_std_in_grpo")
"""Settings of a source that only some estimators use."""


REF_KL_COEF = "ref_kl_coef"
"""Setting of a source alone: a factor of ActorConfig.kl_loss_coef."""


def _flag(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


SOURCE_SETTINGS: Mapping[str, Callable[[str], object]] = {
    "adv_estimator": str,
    "norm_adv_by_std_in_grpo": _flag,
    "gamma": float,
    "lam": float,
    "rl_coef": float,
    "sft_coef": float,
    "echo_coef": float,
    REF_KL_COEF: float,
}
"""What `AlgorithmConfig.by_source` may set -> how its text is read."""


OLD_LOG_PROBS = ("auto", "recompute", "rollout", "interpolate")


@dataclass(frozen=True, kw_only=True)
class KLControlConfig(Options):
    """The weight of the KL divergence in the reward."""

    type: str = option(
        "fixed",
        "fixed; or adaptive: grows while the divergence is above target_kl, shrinks while it is below",
        choices=KL_CONTROLLERS,
        verl=".",
    )
    kl_coef: float = option(
        0.001, "weight of the divergence in the reward (adaptive: the first one)", ge=0, lt=math.inf, verl="."
    )
    target_kl: float = option(
        0.1, "adaptive: wanted divergence, nats per token", gt=0, lt=math.inf, needs="type=adaptive", verl="."
    )
    horizon: int = option(
        10000,
        "adaptive: responses over which the weight changes by at most 20 %",
        ge=1,
        needs="type=adaptive",
        verl=".",
    )


@dataclass(frozen=True, kw_only=True)
class FilterGroupsConfig(Options):
    """Dynamic sampling (DAPO, arXiv:2503.14476).

    Trains on prompts whose responses differ, and generates more until there are enough.
    """

    enable: bool = option(
        False, "leave out prompts whose responses all score alike, and roll out others in their place", verl="."
    )
    metric: str = option("acc", "what is compared", choices=FILTER_METRICS)
    max_num_gen_batches: int = option(
        4,
        "most rounds of generation per step; after them it trains on the prompts it has, if each rank gets a row",
        ge=1,
    )


@dataclass(frozen=True, kw_only=True)
class OverlongConfig(Options):
    """Soft overlong penalty (DAPO, eq. 13), added to the score."""

    buffer_len: int = option(
        0, "tokens before RolloutConfig.response_length over which the penalty grows; 0: no penalty", ge=0
    )
    penalty_factor: float = option(
        1.0, "maximum penalty, that of a response of full length", ge=0, lt=math.inf, needs="buffer_len>0"
    )


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(Options):
    """How advantages come from rewards."""

    name: str = option("grpo", "algorithm whose defaults apply; algorithm=NAME is short for it", resume="silent")
    adv_estimator: str = option(
        "grpo",
        "advantage estimator",
        plugins="rl_trainer.advantage_estimators",
        needs="trains_policy",
    )
    rl_coef: float = option(
        1.0, "weight of the policy loss; 0: neither it nor advantages are computed", ge=0, lt=math.inf
    )
    sft_coef: float = option(
        0.0,
        "weight of the cross-entropy of the data's own answers; above 0, the last response to each training prompt is its answer, and is "
        "not generated",
        ge=0,
        lt=math.inf,
    )
    echo_coef: float = option(
        0.0,
        "weight of the cross-entropy of what tools and environments answer, in the responses of agents: the policy also learns what follows "
        "from its actions",
        ge=0,
        lt=math.inf,
    )
    by_source: tuple[str, ...] = option(
        (),
        "settings for the rows of one data_source, as in adv_estimator=rloo@chat,rl_coef=0@answers,sft_coef=1@answers: "
        f"{', '.join(SOURCE_SETTINGS)} (a factor of ActorConfig.kl_loss_coef); other rows have those of the algorithm",
    )
    teacher_context: str = option(
        "",
        f"self-distillation: text that the reference policy sees before each prompt and the policy does not; {ANSWER} in it stands for the data's "
        "answer. It may name special tokens of the model, such as those around a system message",
        needs="reads_reference",
    )
    teacher_is_policy: bool = option(
        False,
        "the reference policy is the policy as it is before each update, with teacher_context; false: the initial one",
        needs="teacher_context",
    )
    teacher_ema: float = option(
        0.0,
        "with teacher_is_policy, the teacher is the moving average of the policy's weights with this decay per step, such as 0.99 (SDFT, "
        "arXiv:2601.19897); 0: the policy as it is before each update",
        ge=0,
        lt=1,
        needs="teacher_is_policy",
    )
    gamma: float = option(1.0, "discount per token; gigpo: per turn", ge=0, le=1, needs="discounts", verl=".")
    lam: float = option(1.0, "lambda of GAE", ge=0, le=1, needs="trains_critic", verl=".")
    norm_adv_by_std_in_grpo: bool = option(
        True,
        "grpo, grpo_passk, gdpo, gigpo: divide by the standard deviation of the group",
        needs="divides_by_std",
        verl=".",
    )
    gdpo_reward_keys: tuple[str, ...] = option(
        (), "gdpo: names of what the reward function returns, such as score,acc", verl="."
    )
    gdpo_reward_weights: tuple[float, ...] = option(
        (), "gdpo: weights of gdpo_reward_keys; empty: all 1", lt=math.inf, verl="."
    )
    gigpo_step_coef: float = option(
        1.0,
        "gigpo: weight of a turn's advantage, beside that of its session",
        ge=0,
        lt=math.inf,
        needs="estimates_gigpo",
    )
    rae_decay: float = option(
        0.95,
        "rae: decay of a role's running mean score, at each response",
        ge=0,
        lt=1,
        needs="estimates_rae",
    )
    use_kl_in_reward: bool = option(
        False, "subtract the divergence from the reference policy from each token's reward", verl="."
    )
    kl_penalty: str = option(
        "k1", "estimator of the divergence in the reward: " + ", ".join(KL_PENALTIES), needs="reads_reference", verl="."
    )
    kl_ctrl: KLControlConfig = group(
        KLControlConfig, "weight of the divergence in the reward", needs="use_kl_in_reward", verl="."
    )
    old_log_prob: str = option(
        "auto",
        "log-probs of the old policy in the ratio of the policy loss: recompute (by a pass of the actor), rollout (those of the rollout engine; "
        "the rollout correction moves into the loss), interpolate (decoupled PPO without that pass: between those of the rollout engine and of "
        "the policy being trained, by the age of the token's weights), or auto (those of the rollout engine in each step in which they agree "
        "with the actor's)",
        choices=OLD_LOG_PROBS,
        needs="trains_policy",
    )
    old_log_prob_tolerance: float = option(
        1e-3,
        "auto: largest mean difference between log-probs of rollout engine and actor at which they agree, nats per token",
        gt=0,
        needs="old_log_prob=auto",
    )
    router_replay: str = option(
        "disabled",
        "experts of each token in the passes of the actor, for a mixture-of-experts model: those of the rollout engine (R3, arXiv:2510.11370), "
        "those of the actor's pass before the update (R2, arXiv:2512.01374), or those that the router chooses in each pass (disabled)",
        choices=ROUTER_REPLAYS,
        verl="actor_rollout_ref.actor.megatron.router_replay.mode",
    )
    rollout_correction: RolloutCorrectionConfig = group(RolloutCorrectionConfig, "train/rollout mismatch", verl=".")
    filter_groups: FilterGroupsConfig = group(FilterGroupsConfig, "dynamic sampling", needs="enable", verl=".")

    @condition("AlgorithmConfig.adv_estimator=gigpo")
    def estimates_gigpo(self) -> bool:
        """Whether any rows have this estimator."""
        return any(one.adv_estimator == "gigpo" for one in self.variants)

    @condition("AlgorithmConfig.adv_estimator=rae")
    def estimates_rae(self) -> bool:
        """Whether any rows have this estimator."""
        return any(one.adv_estimator == "rae" for one in self.variants)

    def check(self, path: str) -> None:
        self._check_sources(path)
        kl_name(self.kl_penalty, KL_PENALTIES, f"{path}kl_penalty")
        require(
            self.use_kl_in_reward or self.kl_ctrl.type == "fixed",
            f"{path}kl_ctrl.type",
            "fixed without use_kl_in_reward=true",
            self.kl_ctrl.type,
        )
        require(
            self.router_replay != "R2" or self.old_log_prob in ("auto", "recompute"),
            f"{path}router_replay",
            "disabled or R3 without the pass before the update, which old_log_prob=recompute makes",
            self.router_replay,
        )
        require(
            len(self.component_weights) == len(self.gdpo_reward_keys),
            f"{path}gdpo_reward_weights",
            f"one for each of the {len(self.gdpo_reward_keys)} keys",
            self.component_weights,
        )

    def _check_sources(self, path: str) -> None:
        given = [(name, source) for name, _, source in map(_source_setting, self.by_source)]
        require(len(set(given)) == len(given), f"{path}by_source", "each setting of a source once", self.by_source)
        for text in self.by_source:
            name, value, source = _source_setting(text)
            require(
                name in SOURCE_SETTINGS and bool(value) and bool(source),
                f"{path}by_source",
                f"setting=value@source, with one of {', '.join(SOURCE_SETTINGS)}",
                text,
            )
            try:
                number = SOURCE_SETTINGS[name](value)
            except (ValueError, KeyError):
                raise ConfigError(
                    f"{path}by_source: the value of {text!r} can't be read; write rl_coef=0.5@{source}."
                ) from None
            if name in DISCOUNTS:
                require(0 <= float(value) <= 1, f"{path}by_source", f"{name} from 0 to 1", text)
            within = not isinstance(number, float) or 0 <= number < float("inf")
            require(within, f"{path}by_source", "weights that are finite and at least 0", text)

    @cached_property
    def _of_sources(self) -> Mapping[str, Mapping[str, Any]]:
        """Data source -> its settings by name."""
        found: dict[str, dict[str, Any]] = {}
        for text in self.by_source:
            name, value, source = _source_setting(text)
            found.setdefault(source, {})[name] = SOURCE_SETTINGS[name](value)
        return found

    @property
    def sources(self) -> tuple[str, ...]:
        """The data sources that `by_source` names."""
        return tuple(self._of_sources)

    @property
    def weigh_divergence(self) -> tuple[str, ...]:
        """The sources for which `by_source` sets the weight of the divergence."""
        return tuple(source for source, given in self._of_sources.items() if REF_KL_COEF in given)

    def estimator_settings_of(self, data_source: str) -> tuple[str, ...]:
        """Which of ESTIMATOR_SETTINGS `by_source` sets for a source."""
        return tuple(name for name in self._of_sources[data_source] if name in ESTIMATOR_SETTINGS)

    @cached_property
    def _settings(self) -> Mapping[str, AlgorithmConfig]:
        """Data source -> the settings for its rows."""
        return {
            source: replace(self, by_source=(), **{name: one for name, one in given.items() if name != REF_KL_COEF})
            for source, given in self._of_sources.items()
        }

    @cached_property
    def _unnamed(self) -> AlgorithmConfig:
        """The settings for rows of sources that `by_source` does not name."""
        return replace(self, by_source=()) if self.by_source else self

    def for_source(self, data_source: str) -> AlgorithmConfig:
        """The settings for rows of a data source, without `by_source`."""
        return self._settings.get(data_source, self._unnamed)

    def ref_kl_coef(self, data_source: str) -> float:
        """Weight of the divergence from the reference for rows of a data source.

        0 by default for those of a source that `by_source` sets to train on answers alone.
        """
        given, one = self._of_sources.get(data_source, {}), self.for_source(data_source)
        alone = given and one.sft_coef and not one.rl_coef
        return given.get(REF_KL_COEF, 0.0 if alone else 1.0)

    @cached_property
    def variants(self) -> tuple[AlgorithmConfig, ...]:
        """The settings of rows that `by_source` does not name, and those of each source that it
        names.
        """
        return (self._unnamed, *self._settings.values())

    @condition("AlgorithmConfig.rl_coef greater than 0")
    def trains_policy(self) -> bool:
        """Whether any rows have a policy loss."""
        return any(one.rl_coef > 0 for one in self.variants)

    @property
    def demonstrates(self) -> bool:
        """Whether answers of the data are trained on."""
        return any(one.sft_coef > 0 for one in self.variants)

    @property
    def trains_observations(self) -> bool:
        """Whether observations of agents are trained on."""
        return any(one.echo_coef > 0 for one in self.variants)

    def given_responses(self, data_source: str, n: int, *, divergence: bool) -> int:
        """How many of the `n` responses to a prompt are the data's answer.

        All of them where nothing would be trained on the others, else one, if any.

        Args:
            data_source: of the prompt.
            n: responses to each prompt.
            divergence: whether the divergence from the reference is part of the loss.
        """
        one = self.for_source(data_source)
        if not one.sft_coef:
            return 0
        others = one.rl_coef or one.echo_coef or (divergence and self.ref_kl_coef(data_source))
        return 1 if others else n

    def sessions(self, data_source: str, n: int, *, divergence: bool) -> int:
        """How many responses to a prompt are trained on: 1 where all would be its answer, else `n`.

        For the arguments see `given_responses`.
        """
        return 1 if self.given_responses(data_source, n, divergence=divergence) == n else n

    def fewest_sessions(self, n: int, *, divergence: bool) -> int:
        """The least `sessions` of a data source, named in `by_source` or not."""
        return min(self.sessions(source, n, divergence=divergence) for source in ("", *self.sources))

    @property
    def component_weights(self) -> tuple[float, ...]:
        """`gdpo_reward_weights`; 1 for each key when empty."""
        return self.gdpo_reward_weights or (1.0,) * len(self.gdpo_reward_keys)


def _source_setting(text: str) -> tuple[str, str, str]:
    """Name, value and data source of one item of `AlgorithmConfig.by_source`.

    >>> _source_setting("rl_coef=0.5@chat")
    ('rl_coef', '0.5', 'chat')
    """
    name, _, rest = text.partition("=")
    value, _, source = rest.partition("@")
    return name.strip(), value.strip(), source.strip()
