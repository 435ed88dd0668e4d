"""From a verl 0.9 configuration to ours: a list of overrides as on its command line, or YAML.

What is not given has verl's default, not ours: a list of overrides means what it meant there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_app_ppo.spellings import SPELLINGS, plain
from rl_protocol import ConfigError
from rl_trainer.algorithms.advantages import ADVANTAGE_ESTIMATORS
from rl_trainer.algorithms.kl import KL_ALIASES, KL_LOSSES
from rl_trainer.algorithms.policy_losses import POLICY_LOSSES
from rl_trainer.algorithms.registry import nearest
from rl_trainer.algorithms.schedules import LR_SCHEDULES
from rl_trainer.config import CRITIC_AGG_MODES

Value = Any
Mapped = Mapping[str, Value]
Turn = Callable[[Value, Mapping[str, Value]], Mapped | str]
"""(value of one of verl's keys, all that were given) -> our settings, or why there are none."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of a verl configuration."""

    settings: dict[str, Value]
    """Ours: dotted key -> value; where nothing was given, verl's default."""
    given: frozenset[str]
    """Those of them that do not come from a default."""
    left: dict[str, str]
    """verl's key -> why it could not be mapped."""


_OPTIM = {
    "lr": "lr",
    "weight_decay": "weight_decay",
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
    "tau_pos",
    "tau_neg",
    "policy_loss.clip_cov_ratio",
    "policy_loss.clip_cov_lb",
    "policy_loss.clip_cov_ub",
    "policy_loss.kl_cov_ratio",
    "policy_loss.ppo_kl_coef",
]
_ALGORITHM = [
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
    "rollout_correction.rollout_is",
    "rollout_correction.rollout_is_threshold",
    "rollout_correction.rollout_is_batch_normalize",
    "rollout_correction.rollout_rs",
    "rollout_correction.rollout_rs_threshold",
    "rollout_correction.bypass_mode",
]
_ROLLOUT = [
    "name",
    "n",
    "temperature",
    "top_p",
    "dtype",
    "ignore_eos",
    "tensor_model_parallel_size",
    "val_kwargs.n",
    "val_kwargs.temperature",
]

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
    "actor_rollout_ref.actor.use_remove_padding": "actor.use_remove_padding",
    "actor_rollout_ref.model.use_remove_padding": "actor.use_remove_padding",
    "actor_rollout_ref.actor.fsdp_config.reshard_after_forward": "fsdp.reshard_after_forward",
    "actor_rollout_ref.actor.fsdp_config.offload_policy": "fsdp.cpu_offload",
    **{
        f"actor_rollout_ref.actor.megatron.{name}": f"megatron.{name}"
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    },
    "actor_rollout_ref.actor.megatron.use_distributed_optimizer": "megatron.distributed_optimizer",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "fsdp.activation_checkpointing",
    "critic.grad_clip": "critic.optim.grad_clip",
    "critic.model.use_remove_padding": "critic.use_remove_padding",
    **{
        f"data.{name}": f"data.{name}"
        for name in ("train_batch_size", "prompt_key", "max_prompt_length", "filter_overlong_prompts")
    },
    "data.max_response_length": "rollout.response_length",
    "actor_rollout_ref.rollout.response_length": "rollout.response_length",
    "data.seed": "trainer.seed",
    "trainer.critic_warmup": "critic.warmup_steps",
    "trainer.default_local_dir": "trainer.output_dir",
    "trainer.experiment_name": "trainer.run_name",
    **{f"trainer.{name}": f"trainer.{name}" for name in ("total_training_steps", "val_before_train")},
}
"""Keys whose value means the same here."""

DEFAULTS: Mapping[str, Value] = {
    "model_engine": "fsdp",
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.filter_groups.metric": "score",
    "data.train_batch_size": 1024,
    "lora.alpha": 16,
    "fsdp.param_dtype": "bfloat16",
    "megatron.param_dtype": "bfloat16",
    "megatron.distributed_optimizer": True,
    "fsdp.activation_checkpointing": True,
    "actor.ppo_mini_batch_size": 256,
    "actor.use_remove_padding": True,
    "actor.clip_ratio_high": 0.2,
    "actor.use_kl_loss": False,
    "actor.kl_loss_coef": 0.001,
    "actor.optim.lr": 1e-6,
    "actor.optim.beta2": 0.999,
    "actor.optim.weight_decay": 0.01,
    "actor.optim.lr_warmup_steps": 0,
    "critic.use_remove_padding": True,
    "critic.optim.lr": 1e-5,
    "critic.optim.beta2": 0.999,
    "critic.optim.weight_decay": 0.01,
    "critic.optim.lr_warmup_steps": 0,
    "rollout.n": 1,
    "rollout.response_length": 512,
    "trainer.test_freq": 0,
}
"""Our keys -> verl's defaults, where a default or a preset of ours says something else."""
_MAX_TOKENS = {"actor": 16384, "critic": 32768}
_INHERITED = ("ppo_mini_batch_size", "ppo_epochs", "loss_agg_mode")
"""Settings of verl's critic that are the actor's where they are not given."""

FUSED = {
    "linear_qkv": "q_proj,k_proj,v_proj",
    "linear_proj": "o_proj",
    "linear_fc1": "gate_proj,up_proj",
    "linear_fc2": "down_proj",
}
"""Megatron-Core's modules -> the logical names they hold."""
_ESTIMATORS = {
    **{name: name for name in ADVANTAGE_ESTIMATORS.names()},
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
    "tir_optimal_token_baseline": "optimal_token_baseline",
}
_KL = {name: name for name in (*KL_LOSSES, *KL_ALIASES, *(f"{alias}+" for alias in KL_ALIASES))}
_DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
_METRICS = {"acc": "acc", "score": "score", "reward": "score", "seq_reward": "score"}


def _one_of(key: str, known: Mapping[str, str]) -> Turn:
    def turn(value: Value, _: Mapping[str, Value]) -> Mapped | str:
        if value in known:
            return {key: known[value]}
        return f"there is no {value} here.{nearest(str(value), known)}"

    return turn


def _set_only_if_positive(key: str, why: str) -> Turn:
    """verl writes 0 or -1 for "not set"."""

    def turn(value: Value, _: Mapping[str, Value]) -> Mapped | str:
        return {key: value} if value > 0 else why if why and value else {}

    return turn


def _dynamic(role: str, verl: Mapping[str, Value]) -> bool:
    actors = bool(verl.get("actor_rollout_ref.actor.use_dynamic_bsz", False))
    return actors if role == "actor" else bool(verl.get("critic.use_dynamic_bsz", actors))


def _when(role: str, *, dynamic: bool, key: str) -> Turn:
    def turn(value: Value, verl: Mapping[str, Value]) -> Mapped | str:
        if _dynamic(role, verl) == dynamic:
            return {f"{role}.{key}": value}
        return f"nothing reads it with use_dynamic_bsz={not dynamic}"

    return turn


def _nothing(_value: Value, _verl: Mapping[str, Value]) -> Mapped:
    """It says how other keys are read."""
    return {}


def _decays(optim: str, verl: Mapping[str, Value]) -> bool:
    return (
        verl.get(f"{optim}.lr_scheduler_type", "constant") != "constant"
        and verl.get(f"{optim}.total_training_steps", -1) > 0
    )


def _schedule(optim: str, role: str) -> dict[str, Turn]:
    """The learning rate of one of verl's optimizers: it falls only where its end is given, for ours does not know the size of the data."""

    def scheduler(value: Value, verl: Mapping[str, Value]) -> Mapped | str:
        if value not in LR_SCHEDULES:
            return f"there is no {value} here.{nearest(str(value), LR_SCHEDULES)}"
        if value == "constant" or _decays(optim, verl):
            return {f"{role}.optim.lr_scheduler_type": value}
        return f"set {role}.optim.lr_scheduler_type and {role}.optim.lr_decay_steps, which verl works out from the data"

    def steps(value: Value, verl: Mapping[str, Value]) -> Mapped | str:
        if _decays(optim, verl):
            return {f"{role}.optim.lr_decay_steps": value}
        return "nothing reads it with a constant learning rate" if value > 0 else {}

    return {
        f"{optim}.lr_scheduler_type": scheduler,
        f"{optim}.total_training_steps": steps,
        f"{optim}.lr_warmup_steps": _set_only_if_positive(f"{role}.optim.lr_warmup_steps", ""),
        f"{optim}.betas": lambda v, _: {f"{role}.optim.beta1": v[0], f"{role}.optim.beta2": v[1]},
    }


def _micro(prefix: str, role: str) -> dict[str, Turn]:
    return {
        f"{prefix}.use_dynamic_bsz": _nothing,
        f"{prefix}.ppo_micro_batch_size_per_gpu": _when(role, dynamic=False, key="ppo_micro_batch_size"),
        f"{prefix}.ppo_max_token_len_per_gpu": _when(role, dynamic=True, key="ppo_max_token_len"),
    }


def _overlong(prefix: str) -> dict[str, Turn]:
    def on(key: str) -> Turn:
        def turn(value: Value, verl: Mapping[str, Value]) -> Mapped | str:
            enabled = verl.get(f"{prefix}.enable", False)
            return {f"reward.overlong.{key}": value} if enabled else f"nothing reads it without {prefix}.enable=True"

        return turn

    return {
        f"{prefix}.enable": _nothing,
        f"{prefix}.len": on("buffer_len"),
        f"{prefix}.penalty_factor": on("penalty_factor"),
    }


def _clip_ratio(value: Value, verl: Mapping[str, Value]) -> Mapped:
    sides = [f"clip_ratio_{side}" for side in ("low", "high")]
    return {f"actor.{side}": value for side in sides if verl.get(f"actor_rollout_ref.actor.{side}") is None}


def _loggers(value: Value, _: Mapping[str, Value]) -> Mapped | str:
    names = [name.strip() for name in str(plain(value)).split(",")]
    known = [name for name in names if name in ("console", "tensorboard", "wandb", "mlflow", "trackio")]
    return {"trainer.logger": ",".join(known)} if known else f"there is no logger {plain(value)} here"


def _sequence_parallel(value: Value, verl: Mapping[str, Value]) -> Mapped | str:
    """verl has it on where no ranks share a layer as well, and Megatron passes over it there."""
    shared = int(verl.get("actor_rollout_ref.actor.megatron.tensor_model_parallel_size", 1)) > 1
    return {"megatron.sequence_parallel": bool(value) and shared}


def _strategy(value: Value, _: Mapping[str, Value]) -> Mapped | str:
    engines = {"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"}
    if value not in engines:
        return f"there is no {value} here.{nearest(str(value), engines)}"
    return {"model_engine": engines[value]}


SPECIAL: Mapping[str, Turn] = {
    "actor_rollout_ref.actor.clip_ratio": _clip_ratio,
    "actor_rollout_ref.actor.policy_loss.loss_mode": _one_of(
        "actor.policy_loss.loss_mode", {name: name for name in POLICY_LOSSES.names()}
    ),
    "actor_rollout_ref.actor.kl_loss_type": _one_of("actor.kl_loss_type", _KL),
    "actor_rollout_ref.actor.strategy": _strategy,
    "actor_rollout_ref.actor.fsdp_config.dtype": _one_of("fsdp.param_dtype", _DTYPES),
    "actor_rollout_ref.actor.megatron.dtype": _one_of("megatron.param_dtype", _DTYPES),
    "actor_rollout_ref.actor.megatron.sequence_parallel": _sequence_parallel,
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": _set_only_if_positive("fsdp.world_size", ""),
    "actor_rollout_ref.rollout.top_k": lambda v, _: {"rollout.top_k": max(int(v), 0)},
    "data.train_files": lambda v, _: {"data.train_files": plain(v)},
    "data.val_files": lambda v, _: {"data.val_files": plain(v)},
    "data.shuffle": lambda v, _: {} if v else {"data.curriculum": "sequential"},
    "trainer.logger": _loggers,
    "global_profiler.steps": lambda v, _: {"trainer.profile_steps": plain(v)},
    "trainer.save_freq": lambda v, _: {"trainer.save_freq": max(int(v), 0)},
    "trainer.max_actor_ckpt_to_keep": lambda v, _: {"trainer.max_ckpt_to_keep": v},
    "trainer.max_critic_ckpt_to_keep": lambda v, _: {"trainer.max_ckpt_to_keep": v},
    "trainer.resume_mode": lambda v, _: {} if v == "resume_path" else {"trainer.resume_mode": v},
    "trainer.resume_from_path": lambda v, _: {"trainer.resume_mode": v} if v else {},
    "trainer.test_freq": lambda v, _: {"trainer.test_freq": max(int(v), 0)},
    "algorithm.adv_estimator": _one_of("algorithm.adv_estimator", _ESTIMATORS),
    "algorithm.filter_groups.metric": _one_of("algorithm.filter_groups.metric", _METRICS),
    "algorithm.filter_groups.max_num_gen_batches": _set_only_if_positive(
        "algorithm.filter_groups.max_num_gen_batches", ""
    ),
    **_schedule("actor_rollout_ref.actor.optim", "actor"),
    **_schedule("critic.optim", "critic"),
    **_micro("actor_rollout_ref.actor", "actor"),
    **_micro("critic", "critic"),
    **_overlong("reward.reward_kwargs.overlong_buffer_cfg"),
    **_overlong("reward_model.reward_kwargs.overlong_buffer_cfg"),
    **_overlong("reward_model.overlong_buffer"),
}
"""Keys whose value is turned into something else, or that others have a say in."""

_REASONS = {
    "trainer.n_gpus_per_node": "set fsdp.world_size or megatron.world_size to the number of processes that share each model",
    "trainer.nnodes": "this version trains on one host",
    "custom_reward_function.path": "set reward.function=path.py:name",
    "data.sampler.class_path": "set data.curriculum to the name of a curriculum that an installed package offers",
    "data.sampler.class_name": "set data.curriculum to the name of a curriculum that an installed package offers",
    "custom_reward_function.name": "set reward.function=path.py:name",
    "trainer.total_epochs": "set trainer.total_training_steps",
    "actor_rollout_ref.actor.ppo_micro_batch_size": "set ppo_micro_batch_size_per_gpu, which counts the same everywhere",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "set actor.optim.lr_warmup_steps",
    "critic.optim.lr_warmup_steps_ratio": "set critic.optim.lr_warmup_steps",
    "critic.strategy": "one engine trains all models: model_engine",
    "actor_rollout_ref.ref.strategy": "one engine trains all models: model_engine",
}


def import_verl(values: Mapping[str, Value]) -> Imported:
    """Turn verl's dotted keys into ours. Null values are its way to say "default" and are left out, as are its `_target_` classes.

    The result has not been checked: `rl_app_ppo.config.resolve` does that.
    """
    settings: dict[str, Value] = {}
    left: dict[str, str] = {}
    verl = {key.lstrip("+"): value for key, value in values.items() if value is not None}
    for given, value in values.items():
        key = given.lstrip("+")
        if value is None or key.endswith("._target_"):
            continue
        mapped = _mapped(key, value, verl)
        if isinstance(mapped, str):
            left[given] = mapped
            continue
        for name, ours in mapped.items():
            if name in settings and settings[name] != ours:
                left[given] = f"{name} is {settings[name]!r} already, by another key of verl's that means the same"
            else:
                settings[name] = ours
    return Imported({**_defaults(settings, verl), **settings}, frozenset(settings), left)


def _defaults(settings: Mapping[str, Value], verl: Mapping[str, Value]) -> dict[str, Value]:
    out = dict(DEFAULTS)
    for name in _INHERITED:
        value = settings.get(f"actor.{name}", DEFAULTS.get(f"actor.{name}"))
        if value is not None and (name != "loss_agg_mode" or value in CRITIC_AGG_MODES):
            out[f"critic.{name}"] = value
    return out | {f"{role}.ppo_max_token_len": most for role, most in _MAX_TOKENS.items() if _dynamic(role, verl)}


def _mapped(key: str, value: Value, verl: Mapping[str, Value]) -> Mapped | str:
    if isinstance(value, str) and "${" in value:
        return "it refers to another key; give its value"
    if key in SPECIAL:
        return SPECIAL[key](value, verl)
    if key not in RENAMED:
        return _REASONS.get(key, "there is no such setting here")
    name = RENAMED[key]
    return {name: _modules(plain(value)) if name in ("lora.target_modules", "lora.exclude") else value}


def _modules(names: str) -> str:
    return ",".join(FUSED.get(name, name) for name in names.split(","))


def report(imported: Imported, unused: Mapping[str, str]) -> str:
    """What could not be mapped, and what was given and would have no effect (key -> what it needs), one line each, as YAML comments."""
    lines = [f"# not mapped: {key}: {why}" for key, why in sorted(imported.left.items())]
    idle = sorted(unused.keys() & imported.given)
    lines += [f"# left out: {key}: nothing reads it without {unused[key]}" for key in idle]
    return "".join(line + "\n" for line in lines)


def with_references_resolved(values: Mapping[str, Value]) -> dict[str, Value]:
    """Nested values of a YAML file of verl's, in which keys refer to others as OmegaConf has it (`${data.seed}`).

    Raises:
        ConfigError: a reference to nothing.
    """
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(dict(values)), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"A value of the verl configuration refers to what is not there: {error}") from error
    return cast(dict[str, Value], resolved)


def split_overrides(words: Sequence[str], parse: Callable[[str], Value]) -> dict[str, Value]:
    """`key=value` words of a verl command line -> dotted keys; `parse` reads a value."""
    pairs = (word.partition("=") for word in words)
    return {key: parse(value) for key, sign, value in pairs if sign}
