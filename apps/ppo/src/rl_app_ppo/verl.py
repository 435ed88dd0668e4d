"""From a verl 0.9 configuration to ours: a list of overrides as on its command line, or YAML."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_app_ppo.spellings import SPELLINGS, plain

Value = Any
Mapped = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of a verl configuration."""

    settings: dict[str, Value]
    """Ours: dotted key -> value."""
    left: dict[str, str]
    """verl's key -> why it could not be mapped."""


_OPTIM = {
    "lr": "lr",
    "weight_decay": "weight_decay",
    "lr_warmup_steps": "lr_warmup_steps",
    "lr_scheduler_type": "lr_scheduler_type",
    "min_lr_ratio": "min_lr_ratio",
    "clip_grad": "grad_clip",
}
_ACTOR = [
    "ppo_mini_batch_size",
    "ppo_epochs",
    "clip_ratio_low",
    "clip_ratio_high",
    "clip_ratio_c",
    "loss_agg_mode",
    "loss_scale_factor",
    "entropy_coeff",
    "use_kl_loss",
    "kl_loss_coef",
    "kl_loss_type",
    "tau_pos",
    "tau_neg",
    "policy_loss.loss_mode",
    "policy_loss.clip_cov_ratio",
    "policy_loss.clip_cov_lb",
    "policy_loss.clip_cov_ub",
    "policy_loss.kl_cov_ratio",
    "policy_loss.ppo_kl_coef",
]
_ALGORITHM = [
    "adv_estimator",
    "gamma",
    "lam",
    "norm_adv_by_std_in_grpo",
    "use_kl_in_reward",
    "kl_penalty",
    "kl_ctrl.type",
    "kl_ctrl.kl_coef",
    "kl_ctrl.target_kl",
    "kl_ctrl.horizon",
    "filter_groups.enable",
    "filter_groups.metric",
    "filter_groups.max_num_gen_batches",
    "rollout_correction.rollout_is",
    "rollout_correction.rollout_is_threshold",
    "rollout_correction.rollout_is_batch_normalize",
    "rollout_correction.rollout_rs",
    "rollout_correction.rollout_rs_threshold",
    "rollout_correction.bypass_mode",
]
_ROLLOUT = ["n", "temperature", "top_p", "ignore_eos", "val_kwargs.n", "val_kwargs.temperature"]

RENAMED: Mapping[str, str] = {
    **SPELLINGS,
    **{f"actor_rollout_ref.actor.{name}": f"actor.{name}" for name in _ACTOR},
    **{f"actor_rollout_ref.actor.optim.{verl}": f"actor.optim.{ours}" for verl, ours in _OPTIM.items()},
    **{f"critic.optim.{verl}": f"critic.optim.{ours}" for verl, ours in _OPTIM.items()},
    **{
        f"critic.{name}": f"critic.{name}"
        for name in ("ppo_mini_batch_size", "ppo_epochs", "cliprange_value", "loss_agg_mode")
    },
    **{f"algorithm.{name}": f"algorithm.{name}" for name in _ALGORITHM},
    **{f"actor_rollout_ref.rollout.{name}": f"rollout.{name}" for name in _ROLLOUT},
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.actor.grad_clip": "actor.optim.grad_clip",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "actor.ppo_micro_batch_size",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "actor.ppo_max_token_len",
    "actor_rollout_ref.actor.optim.total_training_steps": "actor.optim.lr_decay_steps",
    "actor_rollout_ref.actor.fsdp_config.reshard_after_forward": "fsdp.reshard_after_forward",
    "actor_rollout_ref.actor.fsdp_config.dtype": "fsdp.param_dtype",
    "actor_rollout_ref.actor.fsdp_config.offload_policy": "fsdp.cpu_offload",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": "fsdp.world_size",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "fsdp.activation_checkpointing",
    "critic.grad_clip": "critic.optim.grad_clip",
    "critic.ppo_micro_batch_size_per_gpu": "critic.ppo_micro_batch_size",
    "critic.ppo_max_token_len_per_gpu": "critic.ppo_max_token_len",
    "critic.model.use_remove_padding": "critic.use_remove_padding",
    "data.train_batch_size": "data.train_batch_size",
    "data.max_response_length": "rollout.response_length",
    "data.seed": "trainer.seed",
    "reward_model.overlong_buffer.len": "reward.overlong.buffer_len",
    "reward_model.overlong_buffer.penalty_factor": "reward.overlong.penalty_factor",
    "trainer.critic_warmup": "critic.warmup_steps",
    "trainer.default_local_dir": "trainer.output_dir",
    "trainer.experiment_name": "trainer.run_name",
    **{f"trainer.{name}": f"trainer.{name}" for name in ("total_training_steps", "val_before_train")},
}
"""Keys whose value means the same here."""

FUSED = {
    "linear_qkv": "q_proj,k_proj,v_proj",
    "linear_proj": "o_proj",
    "linear_fc1": "gate_proj,up_proj",
    "linear_fc2": "down_proj",
}
"""Megatron-Core's modules -> the logical names they hold."""
_ESTIMATORS = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
_ENGINES = {"fsdp": "fsdp", "fsdp2": "fsdp"}


def _engine(value: Value) -> Mapped | str:
    if value in _ENGINES:
        return {"model_engine": _ENGINES[value]}
    return f"there is no engine for {value} here"


def _loggers(value: Value) -> Mapped | str:
    names = [name.strip() for name in str(plain(value)).split(",")]
    known = [name for name in names if name in ("console", "tensorboard", "wandb")]
    return {"trainer.logger": ",".join(known)} if known else f"there is no logger {plain(value)} here"


SPECIAL: Mapping[str, Callable[[Value], Mapped | str]] = {
    "actor_rollout_ref.actor.clip_ratio": lambda v: {"actor.clip_ratio_low": v, "actor.clip_ratio_high": v},
    "actor_rollout_ref.actor.optim.betas": lambda v: {"actor.optim.beta1": v[0], "actor.optim.beta2": v[1]},
    "critic.optim.betas": lambda v: {"critic.optim.beta1": v[0], "critic.optim.beta2": v[1]},
    "actor_rollout_ref.model.use_remove_padding": lambda v: {"actor.use_remove_padding": v},
    "actor_rollout_ref.actor.strategy": _engine,
    "actor_rollout_ref.rollout.top_k": lambda v: {"rollout.top_k": max(int(v), 0)},
    "trainer.logger": _loggers,
    "trainer.save_freq": lambda v: {"trainer.save_freq": max(int(v), 0)},
    "trainer.max_actor_ckpt_to_keep": lambda v: {"trainer.max_ckpt_to_keep": v},
    "trainer.max_critic_ckpt_to_keep": lambda v: {"trainer.max_ckpt_to_keep": v},
    "trainer.resume_mode": lambda v: {} if v == "resume_path" else {"trainer.resume_mode": v},
    "trainer.resume_from_path": lambda v: {"trainer.resume_mode": v} if v else {},
    "trainer.test_freq": lambda v: {"trainer.test_freq": max(int(v), 0)},
    "algorithm.adv_estimator": lambda v: {"algorithm.adv_estimator": _ESTIMATORS.get(v, v)},
    "reward_model.overlong_buffer.enable": lambda v: {} if v else {"reward.overlong.buffer_len": 0},
    "actor_rollout_ref.actor.use_dynamic_bsz": lambda v: {} if v else {"actor.ppo_max_token_len": 0},
    "critic.use_dynamic_bsz": lambda v: {} if v else {"critic.ppo_max_token_len": 0},
}
"""Keys whose value is turned into something else, or says that another has no part in it."""

_LATER = ("reward_model.overlong_buffer.enable", "actor_rollout_ref.actor.use_dynamic_bsz", "critic.use_dynamic_bsz")
_REASONS = {
    "trainer.n_gpus_per_node": "set fsdp.world_size to the number of processes that share each model",
    "trainer.nnodes": "this version trains on one host",
    "data.train_files": "the only task is the built-in arithmetic",
    "data.val_files": "the only task is the built-in arithmetic",
    "trainer.total_epochs": "set trainer.total_training_steps",
}


def import_verl(values: Mapping[str, Value]) -> Imported:
    """Turn verl's dotted keys into ours. Null values are its way to say "default" and are left out.

    The result has not been checked: `rl_app_ppo.config.resolve` does that.
    """
    settings: dict[str, Value] = {}
    left: dict[str, str] = {}
    ordered = sorted(values.items(), key=lambda item: item[0].lstrip("+~") in _LATER)
    for given, value in ordered:
        key = given.lstrip("+")
        if value is None:
            continue
        mapped = _mapped(key, value)
        if isinstance(mapped, str):
            left[given] = mapped
            continue
        for name, ours in mapped.items():
            if name in settings and settings[name] != ours and key not in _LATER:
                left[given] = f"{name} is {settings[name]!r} already, by another key of verl's that means the same"
            else:
                settings[name] = ours
    return Imported(settings, left)


def _mapped(key: str, value: Value) -> Mapped | str:
    if key in SPECIAL:
        return SPECIAL[key](value)
    if key not in RENAMED:
        return _REASONS.get(key, "there is no such setting here")
    name = RENAMED[key]
    return {name: _modules(plain(value)) if name in ("lora.target_modules", "lora.exclude") else value}


def _modules(names: str) -> str:
    return ",".join(FUSED.get(name, name) for name in names.split(","))


def report(imported: Imported, unused: Mapping[str, str]) -> str:
    """What could not be mapped, and what of ours would have no effect (key -> what it needs), one line each, as YAML comments."""
    lines = [f"# not mapped: {key}: {why}" for key, why in sorted(imported.left.items())]
    lines += [f"# left out: {key}: nothing reads it without {need}" for key, need in sorted(unused.items())]
    return "".join(line + "\n" for line in lines)


def split_overrides(words: Sequence[str], parse: Callable[[str], Value]) -> dict[str, Value]:
    """`key=value` words of a verl command line -> dotted keys; `parse` reads a value."""
    pairs = (word.partition("=") for word in words)
    return {key: parse(value) for key, sign, value in pairs if sign}
