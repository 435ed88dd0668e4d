"""Settings that nothing reads under the rest of the configuration: giving one is an error, not a silence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rl_app_ppo.schema import AppConfig
from rl_protocol import ConfigError
from rl_trainer import needs_critic, needs_reference


@dataclass(frozen=True, slots=True)
class Rule:
    """`keys` (exact, or groups that end in a dot) are read only where `read` says so; `need` is what to set for that."""

    keys: tuple[str, ...]
    read: Callable[[AppConfig], bool]
    need: str
    but: tuple[str, ...] = ()

    def covers(self, key: str) -> bool:
        """Whether the rule is about that key."""
        return key not in self.but and any(key == k or (k.endswith(".") and key.startswith(k)) for k in self.keys)


def _losses(*names: str) -> Callable[[AppConfig], bool]:
    built_in = ("vanilla", "gspo", "geo_mean", "cispo", "sapo", "gpg", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl")

    def read(config: AppConfig) -> bool:
        mode = config.actor.policy_loss.loss_mode
        return mode in names or mode not in built_in  # what an installed loss reads is its own business

    return read


RULES = (
    Rule(("lora.",), lambda c: c.lora.rank > 0, "lora.rank greater than 0", but=("lora.rank",)),
    Rule(("fsdp.",), lambda c: c.model_engine == "fsdp", "model_engine=fsdp"),
    Rule(("megatron.",), lambda c: c.model_engine == "megatron", "model_engine=megatron"),
    Rule(
        ("actor.use_remove_padding", "actor.ppo_max_token_len"),
        lambda c: c.model_engine != "megatron",
        "model_engine=torch or fsdp",
    ),
    Rule(("critic.",), lambda c: needs_critic(c.algorithm), "an estimator with a critic, algorithm.adv_estimator=gae"),
    Rule(
        ("critic.use_remove_padding", "critic.ppo_max_token_len"),
        lambda c: c.model_engine != "megatron",
        "model_engine=torch or fsdp",
    ),
    Rule(("algorithm.lam",), lambda c: needs_critic(c.algorithm), "algorithm.adv_estimator=gae"),
    Rule(("actor.kl_loss_coef", "actor.kl_loss_type"), lambda c: c.actor.use_kl_loss, "actor.use_kl_loss=true"),
    Rule(
        ("algorithm.kl_penalty",),
        lambda c: needs_reference(c.algorithm, c.actor),
        "algorithm.use_kl_in_reward=true or actor.use_kl_loss=true",
    ),
    Rule(("algorithm.kl_ctrl.",), lambda c: c.algorithm.use_kl_in_reward, "algorithm.use_kl_in_reward=true"),
    Rule(
        ("algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.horizon"),
        lambda c: c.algorithm.kl_ctrl.type == "adaptive",
        "algorithm.kl_ctrl.type=adaptive",
    ),
    Rule(
        ("algorithm.rollout_correction.rollout_is_threshold",),
        lambda c: bool(c.algorithm.rollout_correction.rollout_is),
        "algorithm.rollout_correction.rollout_is",
    ),
    Rule(
        ("algorithm.filter_groups.",),
        lambda c: c.algorithm.filter_groups.enable,
        "algorithm.filter_groups.enable=true",
    ),
    Rule(("reward.timeout_s",), lambda c: c.reward.timed, "a reward.function other than exact_match and gsm8k"),
    Rule(
        ("reward.num_workers", "reward.memory_mb"),
        lambda c: c.reward.isolated,
        "a reward.function, other than exact_match and gsm8k, that is code",
    ),
    Rule(
        ("reward.overlong.penalty_factor",),
        lambda c: c.reward.overlong.buffer_len > 0,
        "reward.overlong.buffer_len greater than 0",
    ),
    Rule(
        ("actor.policy_loss.clip_cov_ratio", "actor.policy_loss.clip_cov_lb", "actor.policy_loss.clip_cov_ub"),
        _losses("clip_cov"),
        "actor.policy_loss.loss_mode=clip_cov",
    ),
    Rule(
        ("actor.policy_loss.kl_cov_ratio", "actor.policy_loss.ppo_kl_coef"),
        _losses("kl_cov"),
        "actor.policy_loss.loss_mode=kl_cov",
    ),
    Rule(("actor.tau_pos", "actor.tau_neg"), _losses("sapo"), "actor.policy_loss.loss_mode=sapo"),
    Rule(
        ("actor.clip_ratio_c",),
        _losses("vanilla", "dppo_tv", "dppo_kl"),
        "actor.policy_loss.loss_mode=vanilla, dppo_tv or dppo_kl",
    ),
    Rule(
        ("actor.loss_scale_factor",),
        lambda c: c.actor.loss_agg_mode == "seq-mean-token-sum-norm",
        "actor.loss_agg_mode=seq-mean-token-sum-norm",
    ),
    Rule(
        ("checkpoint_engine.",),
        lambda c: c.checkpoint_engine.enabled,
        "checkpoint_engine.enabled=true",
        but=("checkpoint_engine.enabled",),
    ),
    Rule(("rollout.router",), lambda c: c.rollout.num_workers > 1, "rollout.num_workers greater than 1"),
    Rule(
        ("rollout.kv_cache_mb", "rollout.tensor_model_parallel_size"),
        lambda c: c.rollout.name == "vllm",
        "rollout.name=vllm",
    ),
    Rule(
        ("model.cache_dir",),
        lambda c: not c.model.path or bool(c.data.train_files),
        "model.path empty, for the demo model, or data.train_files",
    ),
    Rule(
        ("data.prompt_key", "data.max_prompt_length", "data.filter_overlong_prompts", "data.on_bad_row"),
        lambda c: bool(c.data.train_files),
        "data.train_files",
    ),
    Rule(
        ("data.val_split",),
        lambda c: bool(c.data.train_files and not c.data.val_files and c.trainer.test_freq),
        "data.train_files without data.val_files, and trainer.test_freq above 0",
    ),
    Rule(
        ("data.demo", "data.train_size", "data.val_size", "data.seed"),
        lambda c: not c.model.path or not c.data.train_files,
        "the demo task or the demo model",
    ),
)


def unused(config: AppConfig, changed: Iterable[str]) -> dict[str, str]:
    """Those of the keys that nothing reads -> what they would need."""
    return {key: rule.need for key in changed for rule in RULES if rule.covers(key) and not rule.read(config)}


def refuse_unused(config: AppConfig, changed: Mapping[str, object]) -> None:
    """Check what was given and differs from what it would be by itself.

    Raises:
        ConfigError: a key that nothing reads; says what it needs.
    """
    for key, need in unused(config, changed).items():
        raise ConfigError(f"{key}={changed[key]} has no effect: nothing reads it without {need}.")
